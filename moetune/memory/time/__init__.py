"""How long a step takes: what its operations do, counted while it is traced, and what a card makes of that."""
