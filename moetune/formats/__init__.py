"""Formats of frozen weights: in memory, in checkpoints, and in exports; a file for each, and a table of all."""
