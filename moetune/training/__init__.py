"""Training: the loop, metrics, run folders and checkpoints; data, steps and optimizers are in the packages below."""
