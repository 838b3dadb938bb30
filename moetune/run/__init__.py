"""A run, resolved once: what everything below a run file and a model is given."""
