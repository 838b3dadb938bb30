"""Optimizers: which, where their states are, and updates inside the backward pass."""
