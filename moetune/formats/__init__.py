"""Formats of frozen weights in memory, checkpoints and exports: a file for each, and a table."""
