"""What leaves a run: a delta, a merged checkpoint, a PEFT adapter."""
