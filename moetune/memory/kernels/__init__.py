"""The kernels of a GPU, in a trace on fake CPU tensors: which attention it runs, and what kernels take inside."""
