"""The kernels of a GPU, in a trace on fake CPU tensors: its attention, and workspaces inside kernels."""
