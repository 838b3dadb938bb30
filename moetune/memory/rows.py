"""`train.keep_rows: auto`: the number of layers for which a GPU has room to keep gate_up's outputs for backward."""

from __future__ import annotations

from collections.abc import Callable

from moetune.memory.report import MemoryReport, Rows
from moetune.run.resolve import ResolvedRun


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


def settled(run: ResolvedRun, predict: Callable[[ResolvedRun], MemoryReport]) -> ResolvedRun:
    """Return a run with a number of layers, or `none`, in place of `train.keep_rows: auto`; other runs unchanged.

    As many layers keep their rows as leave room for the most that a run may need (`span`), so the verdict of a run
    never changes. The
    prediction is repeated until no further layer fits, because a layer that keeps its rows needs less in backward, and
    may take less than its rows. `predict` returns the prediction of a run on the GPU in question; its errors are
    raised.
    """
    if run.config.train.keep_rows != "auto":
        return run
    now = run.keeping_rows(0)
    if rows_of(now) is None:
        return now
    most = predict(now).rows_that_fit or 0
    if most:
        now = run.keeping_rows(most)
        while (more := predict(now).rows_that_fit or 0) > most:
            most, now = more, run.keeping_rows(more)
    return now
