"""Checkpoints in the format that the hub has: files, names, which one exactly."""
