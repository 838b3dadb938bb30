"""The formats of an export: a writer of each, and the new values of trained tensors that they write."""
