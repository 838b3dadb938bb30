"""A run folder: who may write it, its files, checkpoints, and readers."""
