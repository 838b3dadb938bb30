"""The run file: its keys, its values, and how it is read."""
