"""Expert routing on a data set: score experts, choose experts by their scores, compare routing before and after a
run."""
