"""LoRA adapters on disk: the layouts of every program, told apart, read into one form and written from it."""
