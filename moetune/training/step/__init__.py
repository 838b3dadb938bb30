"""A training step: batch, forward and backward, reduce and clip, update."""
