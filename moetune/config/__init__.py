"""What the user writes: the run file, its keys and its values."""
