"""Layers by fewer kernels or less memory than transformers', each an autograd function."""
