"""Runs: the run folder, checkpoints, the trainer, and what is said while one trains."""
