"""Time of a step: the work of its operations, counted while it is traced, and a roofline of the card."""
