"""Layers computed by fewer kernels or with less memory than by transformers; each an autograd function."""
