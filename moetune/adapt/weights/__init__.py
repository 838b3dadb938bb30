"""Load weights (checkpoint, quantized base, random), quantizing the frozen ones."""
