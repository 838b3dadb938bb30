"""Training: loop, metrics and warnings; packages for data, steps, optimizers, run folders."""
