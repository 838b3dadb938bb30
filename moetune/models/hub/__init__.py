"""Checkpoints in hub format: download, safetensors files, quantized formats, key mappings, fingerprints, deltas."""
