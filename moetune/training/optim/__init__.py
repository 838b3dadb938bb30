"""Optimizers, the precision and place of their states, and the learning rate schedule."""
