"""Expert routing on a data set: score experts, choose by score, compare before and after."""
