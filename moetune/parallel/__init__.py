"""Several processes as the ranks of one run: start, layout, expert dispatch, sharding and gradient reduction.

This is the only package that uses torch.distributed, FSDP2, DeepSpeed and transformers' tensor parallelism, except for
their private interfaces, which are in moetune/compat.
"""
