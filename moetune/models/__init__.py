"""Models before adaptation: their sources, structure, parameter counts and choice of what trains; the catalog."""
