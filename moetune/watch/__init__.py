"""Training under observation: progress, memory measured beside its prediction, a report when memory runs out."""
