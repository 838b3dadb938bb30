"""Where frozen weights come from, and how they are quantized while they are read."""
