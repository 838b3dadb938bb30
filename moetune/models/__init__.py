"""Models before adaptation: sources, structure, parameter counts, selection of what trains; catalog and checkpoints."""
