"""The model that trains: load weights, quantize frozen ones, add LoRA, set up checkpointing."""
