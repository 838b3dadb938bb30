"""Expert routing on a data set: score experts, choose experts by score, compare routing before and after a run."""
