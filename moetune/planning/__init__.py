"""Built on predictions: plans, the largest value of a setting, remedies, comparisons, machine checks.

One folder, because all of them ask the same predictor, and search with the same function (fit): what
`auto` becomes (settle), a prediction with advice (predict, savings), a plan and its parts (plan, search, strategies,
workers, candidate, views, figure, files), and other users of predictions.
"""
