"""LoRA adapters on disk: the layouts of every program, detected, read into one form and written from it."""
