"""Memory of a run as a function of its sizes, derived from records of the trainer's own step."""
