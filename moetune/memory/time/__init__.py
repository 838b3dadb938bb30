"""Time of a training step: its operations' work counted in a trace, and estimated seconds on a GPU."""
