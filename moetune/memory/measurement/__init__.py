"""Real steps beside their prediction, and what a device holds when memory runs out."""
