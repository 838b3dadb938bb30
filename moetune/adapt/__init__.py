"""The model that trains: built from a base, its experts packed, LoRA and selections put in."""
