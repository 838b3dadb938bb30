"""Built on predictions: plans for a GPU, the largest value of a setting, remedies, comparisons, machine checks.

One folder, because all of them ask the same predictor: a search and what it is made of (search, runs, bounds, stored,
expert_search, largest, strategies, workers, kept), its question and answer (from_options, plan, solve, tables, figure,
files), and other users of its predictions.
"""
