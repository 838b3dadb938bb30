"""LoRA adapters on disk: every program's layouts, detected, read into one form, and written."""
