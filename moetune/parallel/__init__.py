"""Several ranks as one run: who holds what, how tokens find their experts, how gradients are reduced.

The only place that uses torch.distributed, FSDP2, DeepSpeed and transformers' tensor parallelism.
"""
