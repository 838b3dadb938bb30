"""An optimizer step: collate batches, forward and backward, clip, update."""
