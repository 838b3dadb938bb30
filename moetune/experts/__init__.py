"""The expert stack: how it is stored and computed, a group of experts at a time."""
