"""Training: the loop, its metrics and warnings; the packages below have data, steps, optimizers and run folders."""
