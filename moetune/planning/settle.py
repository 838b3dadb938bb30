"""`settled`: what each layer keeps, in place of `train.checkpointing: auto` or `train.keep_rows: auto`."""

from collections.abc import Mapping

import torch

from moetune.memory.assumed_routing import UNKNOWN, AssumedRouting
from moetune.memory.measurement.measure import catalog_name
from moetune.memory.trace import NotTraceable
from moetune.models.catalog.gpus import Gpu
from moetune.planning.fit import last_that_fits, surely_left
from moetune.planning.predictor import Predictor
from moetune.run.keeps import NOTHING, Keepable, Kept, is_open
from moetune.run.resolve import ResolvedRun


def settled(run: ResolvedRun, gpu: str | Gpu, routing: AssumedRouting = UNKNOWN) -> ResolvedRun:
    """Return a run with values in place of `train.checkpointing: auto` and `train.keep_rows: auto`, as many layers
    keeping as much as surely fits a GPU; others unchanged.

    The last layers keep most: they are the first in backward, so their bytes are freed before other layers are
    recomputed. A run of which `full` does not surely fit keeps nothing, so its verdict never changes.

    Raises:
        UserError: the run cannot be predicted.
    """
    if not is_open(run.config.train):
        return run
    predictor = Predictor(gpu, routing, "high", run.device_type)
    choices = _choices(run)
    last, _ = last_that_fits(
        len(choices),
        lambda number: predictor.of_resolved(run.keeping(choices[number])),
        surely_left,
        start=len(choices) - 1,
    )
    return run.keeping(choices[max(last, 0)])


def _choices(run: ResolvedRun) -> list[dict[int, Kept]]:
    """Return what layers may keep, from nothing to all that `auto` leaves open, each choice a layer more than the one
    before: first attention's outputs, which take least for the time that they save; then the experts' rows; then the
    rest of a layer."""
    layers = list(range(run.structure.num_layers))
    of_experts = [layer.index for layer in run.structure.moe_layers]
    steps: list[tuple[Keepable, list[int]]] = [("rows", of_experts)]
    if run.config.train.checkpointing == "auto":
        steps = [("attention", layers), *steps, ("rest", layers)]
    kept: dict[int, Kept] = {}
    choices = [kept]
    for name, where in steps:
        for layer in reversed(where):
            kept = {**kept, layer: kept.get(layer, NOTHING) | {name}}
            choices.append(kept)
    return choices


def settled_on(run: ResolvedRun, device: torch.device, before: Mapping[int, Kept] | None = None) -> ResolvedRun:
    """Return `settled` for the GPU in `hardware.gpu`, or for `device` if that is not set.

    On a CPU layers keep what is in `before`; if the model's code cannot be traced, they keep nothing. Raises
    `UserError` if the run cannot be predicted.

    Args:
        before: layer -> what it kept before the run was interrupted, which it keeps again if that surely fits.
    """
    if not is_open(run.config.train):
        return run
    as_before = run.keeping(before or {})
    if device.type == "cpu":
        return as_before
    gpu = run.config.hardware.gpu or catalog_name(device)
    try:
        if before and surely_left(Predictor(gpu, end="high").of_resolved(as_before)) >= 0:
            return as_before
        return settled(run, gpu)
    except NotTraceable:
        return run.keeping({})
