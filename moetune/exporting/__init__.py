"""Export of a run: delta, PEFT adapter, merged checkpoint, vLLM adapter; apply a delta; upload to the hub."""
