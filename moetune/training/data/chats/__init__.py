"""Chats as text: chat template, its arguments, thoughts, tool calls, which characters train."""
