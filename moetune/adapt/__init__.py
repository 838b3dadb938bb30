"""The model that trains: built from a base, its experts quantized, LoRA and selections put in."""
