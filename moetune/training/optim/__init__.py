"""Optimizers, the place and precision of their states, the learning rate schedule."""
