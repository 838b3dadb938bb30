"""From a run file to a `ResolvedRun`: the model, what trains, precisions, ranks, and every check without weights."""
