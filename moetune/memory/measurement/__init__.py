"""Real steps on this machine beside their prediction, and what a device holds when its memory runs out."""
