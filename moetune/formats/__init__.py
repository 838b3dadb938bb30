"""Formats of frozen weights in memory, checkpoints and exports: a file each, a table."""
