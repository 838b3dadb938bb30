"""Checkpoints in hub format: download, safetensors files, published quantized formats, key mappings, fingerprints,
deltas.
"""
