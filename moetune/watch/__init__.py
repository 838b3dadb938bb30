"""Training with its watchers: memory beside the prediction, pace, a report when memory runs out."""
