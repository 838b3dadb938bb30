"""Memory of CUDA kernels in traces on fake CPU tensors: attention kernel, workspaces."""
