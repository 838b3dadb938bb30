"""The experts of a layer: quantized storage, forward and backward in groups, GPU kernels."""
