"""Memory of CUDA kernels for traces on fake CPU tensors: choice of the attention kernel, and workspaces."""
