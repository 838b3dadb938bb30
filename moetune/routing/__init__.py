"""Routing on a data set: recorded and scored, experts chosen by it, compared before and after a run."""
