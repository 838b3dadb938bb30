"""Built on predictions: plans for a GPU, the largest value of a setting, remedies, comparisons, machine checks."""
