"""`settled`: what each layer keeps, in place of `train.checkpointing: auto` or `train.keep_rows: auto`."""

from collections.abc import Callable

from moetune.memory.assumed_routing import AssumedRouting
from moetune.memory.keep.costs import Costs
from moetune.memory.report import MemoryReport, Rows
from moetune.memory.unknowns import ERROR, FRAGMENTATION
from moetune.models.catalog.gpus import Gpu
from moetune.run.keeps import is_open
from moetune.run.resolve import ResolvedRun

_TRIES = 8
"""Most choices that are predicted. After each one the budget grows by the bytes it left free, or shrinks by those it
lacked."""


def settled(
    run: ResolvedRun, card: Gpu, routing: AssumedRouting, predict: Callable[[ResolvedRun], MemoryReport]
) -> ResolvedRun:
    """Return a run with values in place of `train.checkpointing: auto` and `train.keep_rows: auto`; others unchanged.

    Layers keep more than with `full` only where the most that the run may need (`span`) then still fits, so its verdict
    never changes.

    Args:
        routing: assumed number of tokens that each expert receives.
        predict: returns the prediction of a run on `card`; if that has no verdict, layers keep nothing more. Its errors
            are raised.
    """
    if not is_open(run.config.train):
        return run
    base = run.keeping({})
    report = predict(base)
    if report.verdict != "yes":
        return base
    costs = Costs.of(base, run, card, routing)
    found, failed = base, None
    budget, low, high = _room(report), -1, None
    for _ in range(_TRIES):
        now = run.keeping(costs.keeps(budget))
        if now.keeps == found.keeps or (failed is not None and now.keeps == failed.keeps):
            break
        told = predict(now)
        if told.verdict == "yes":
            found, low = now, budget
        else:
            failed, high = now, budget
        budget += _room(told)
        budget = budget if high is None else min(budget, high - 1)
        if budget <= low:
            break
    return found


def _room(report: MemoryReport) -> int:
    """Return the bytes by which a run's tensors may grow so that the most that it may need still fits; negative if the
    run does not fit."""
    return int(report.least_headroom // (1 + FRAGMENTATION + ERROR)) if report.gpu else 0


def rows_of(run: ResolvedRun) -> Rows | None:
    """Return how many layers of a run keep their rows, the outputs of gate_up, and the bytes of one layer's rows:
    tokens · top_k · columns of gate_up · bytes of the compute dtype. None for a dense model, for `checkpointing: none`,
    which keeps all, and for several ranks, whose numbers of rows differ."""
    train, layers = run.config.train, run.structure.moe_layers
    if not layers or train.checkpointing == "none" or run.config.parallel.ranks > 1:
        return None
    tokens = train.micro_batch * train.sequence_length
    columns = max(layer.top_k * layer.shape.intermediate * (2 if layer.shape.has_gate else 1) for layer in layers)
    return Rows(len(layers), len(run.keeps_rows), tokens * columns * run.dtype.itemsize)
