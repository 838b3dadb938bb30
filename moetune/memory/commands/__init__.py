"""Predictors of what is not a step of `moetune train`: forward passes, quantizing, moving tensors; training by TRL."""
