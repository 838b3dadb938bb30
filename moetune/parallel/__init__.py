"""Several ranks as one run: who holds what, how tokens find their experts, how gradients are reduced.

The only place that knows torch.distributed, FSDP2 and transformers' expert and tensor parallelism.
"""
