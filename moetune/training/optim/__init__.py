"""Optimizers, where and in which precision their states are kept, and the learning rate schedule."""
