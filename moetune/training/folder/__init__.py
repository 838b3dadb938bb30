"""A run folder: who may write it, its files and checkpoints, and their readers."""
