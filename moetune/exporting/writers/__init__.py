"""A writer for each export format, and the new values of trained tensors."""
