"""Export of a run: delta, adapter, merged checkpoint; apply a delta; convert adapters; upload."""
