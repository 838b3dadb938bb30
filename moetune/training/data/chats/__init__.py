"""Chats as text: the chat template of a tokenizer, its arguments, thoughts, tool calls, and which characters train."""
