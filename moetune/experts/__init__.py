"""The experts of one layer: quantized storage, forward and backward in groups of experts, and GPU kernels."""
