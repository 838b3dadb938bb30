"""`train.checkpointing: auto`: choose what layers keep for backward, so that most time is saved and the run fits.

A step is recorded in which layers that are alike keep different things. It shows, for each thing, the bytes that are
alive between the layer's passes, what the passes themselves need, and their work, from which a roofline estimates the
seconds (costs.py). One thing for each layer is then chosen exactly (knapsack.py). The run's prediction decides whether
that fits (settle.py).
"""
