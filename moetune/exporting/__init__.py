"""What was trained, in the formats of other programs."""
