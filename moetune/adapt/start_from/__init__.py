"""`adapt.start_from`: load an adapter or a delta into an adapted model."""
