"""The memory and time of a run, predicted: traced, by closed form, and reported."""
