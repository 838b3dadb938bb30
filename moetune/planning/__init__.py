"""From what a user has and wants to a run file that fits: one value solved, settings combined, a whole plan."""
