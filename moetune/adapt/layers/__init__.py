"""Layers computed by fewer kernels, or with less memory, than by transformers' code; each is an autograd function."""
