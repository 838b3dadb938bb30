"""Training: the loop, its steps, optimizers and data; run folders and checkpoints."""
