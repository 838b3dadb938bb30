"""Models before adaptation: sources, structure, parameter counts, choice of what trains; the catalog."""
