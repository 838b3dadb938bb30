"""Build the model that trains: load its weights, quantize what stays frozen, add LoRA, set up checkpointing."""
