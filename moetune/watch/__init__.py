"""Training observed: progress, memory beside its prediction, a report when memory runs out."""
