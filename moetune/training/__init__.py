"""Training: loop, metrics, run folders and checkpoints; the packages below have data, steps and optimizers."""
