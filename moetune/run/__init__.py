"""From a run file to a `ResolvedRun`: model, what trains, precisions, ranks, checks."""
