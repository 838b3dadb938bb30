"""Predictors of commands other than `train` (forward passes, quantizing, moving tensors), and of TRL."""
