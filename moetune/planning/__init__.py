"""Searches for run files that fit: the largest value of a setting, changes that save memory, a whole plan."""
