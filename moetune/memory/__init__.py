"""What a run takes: traced, by closed form, and reported."""
