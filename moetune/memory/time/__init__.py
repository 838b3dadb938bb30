"""Time of a training step: work counted in a trace, seconds estimated for a GPU."""
