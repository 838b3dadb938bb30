"""One optimizer step: collate batches, run forward and backward, clip the gradients, update the weights."""
