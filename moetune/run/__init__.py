"""From a run file to a `ResolvedRun`: its model, what trains, its precisions, its ranks, and every check without
weights.
"""
