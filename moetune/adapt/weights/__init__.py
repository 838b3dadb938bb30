"""Load weights (checkpoint, quantized base or random) and quantize the frozen ones on the way."""
