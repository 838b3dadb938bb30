"""Several processes as a run's ranks: start, layout, expert dispatch, sharding, gradient reduction.

This is the only package that uses torch.distributed, FSDP2, DeepSpeed and transformers' tensor parallelism, except for
their private interfaces, which are in moetune/compat.
"""
