"""Export of a run: delta, PEFT or vLLM adapter, merged checkpoint; apply a delta; convert, merge adapters; upload."""
