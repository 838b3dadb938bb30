"""Comparison of a prediction with real steps on this machine, for `moetune verify`; at most 5 % apart is a pass."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moetune.adapt.guard import checked
from moetune.errors import UserError
from moetune.memory.assumed_routing import UNKNOWN, AssumedRouting
from moetune.memory.keep.settle import settled
from moetune.memory.measurement.measure import measure
from moetune.memory.predict import allocator_here, predict, quick
from moetune.memory.trace import NotTraceable, trace
from moetune.models.catalog.gpus import find_gpu
from moetune.run.dtypes import device_kind
from moetune.run.keeps import Kept, is_open
from moetune.run.resolve import AnyRun, ResolvedRun, resolve

TOLERANCE = 0.05
"""Largest relative difference of predicted and measured `peak_allocated` with which `verify` passes."""
_NAMES = ("peak_allocated", "peak_reserved", "peak_process", "host_bytes")


@dataclass(frozen=True)
class Outcome:
    """Predicted and measured memory of the same steps.

    Attributes:
        predicted, measured: name -> bytes, with the names `peak_allocated`, `peak_reserved`, `peak_process` and
            `host_bytes`. None where there is no number: `peak_reserved` and `peak_process` on a CPU, measured
            `host_bytes` on CUDA.
        tokens_per_second: measured speed.
        device: name of the GPU, or `cpu`.
        routing: name of the assumption that the prediction used.
    """

    predicted: dict[str, int | None]
    measured: dict[str, int | None]
    tokens_per_second: float
    device: str
    routing: str

    @property
    def holds(self) -> bool:
        """Whether predicted and measured `peak_allocated` differ by at most `TOLERANCE`."""
        before, after = self.predicted["peak_allocated"], self.measured["peak_allocated"]
        assert before is not None
        assert after is not None
        return abs(before / after - 1) <= TOLERANCE

    def to_json(self) -> dict[str, Any]:
        """Return the object that `moetune verify --json` prints."""
        return {"schema": 1, **self.__dict__, "holds": self.holds}


def verify(
    run: AnyRun, steps: int, routing: AssumedRouting | None = None, device: torch.device | str | None = None
) -> Outcome:
    """Take `steps` real steps with random weights, and predict the memory of the same steps.

    Args:
        run: a resolved run must have been resolved for the kind of `device`.
        routing: assumption of the prediction; None: replay the rows that the experts received in the real steps.
        device: None: the first device of the kind for which the run is resolved.

    Raises:
        UserError: as `measure`; the run has several ranks; or the device does not exist.
    """
    run = resolve(run, device_kind(device))
    if run.config.parallel.ranks > 1:
        raise UserError(
            f"parallel: makes {run.config.parallel.ranks} ranks, but verify measures one process; train two steps on "
            "them instead, and read predicted and measured bytes in memory.json of the run folder"
        )
    device = run.device(device)
    run = settled_on(checked(run, device), device)
    measured = measure(run, device, steps)
    routing = routing or measured.routing
    if device.type == "cpu":
        traced = trace(run, routing)
        allocated, on_host = traced.parts().total, traced.host_peak
        predicted = dict(zip(_NAMES, (allocated, None, None, on_host), strict=True))
    else:
        card, allocator = catalog_name(device), allocator_here()
        report = predict(run, method="trace", gpu=card, routing=routing, allocator=allocator, advise=False)
        predicted = {name: getattr(report.fullest, name) for name in _NAMES}
    return Outcome(
        predicted=predicted,
        measured={name: getattr(measured, name) for name in predicted},
        tokens_per_second=round(measured.tokens_per_second, 1),
        device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        routing=routing.name,
    )


def settled_on(run: ResolvedRun, device: torch.device, before: Mapping[int, Kept] | None = None) -> ResolvedRun:
    """Return a run with values in place of `train.checkpointing: auto` and `train.keep_rows: auto`, as fit on a GPU.

    The GPU is `hardware.gpu`, or `device` if that is not set. On a CPU layers keep what is in `before`; if the model's
    code cannot be traced, they keep nothing. Raises `UserError` if the run cannot be predicted.

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
        if before and quick(as_before, gpu=gpu).verdict == "yes":
            return as_before
        return settled(run, find_gpu(gpu), UNKNOWN, lambda one: quick(one, gpu=gpu))
    except NotTraceable:
        return run.keeping({})


def catalog_name(device: torch.device) -> str:
    """Return the GPU's catalog name; if it is not in the catalog, its memory as a size, such as `47608692736B`."""
    name = torch.cuda.get_device_name(device)
    try:
        return find_gpu(name).name
    except UserError:
        return f"{torch.cuda.get_device_properties(device).total_memory}B"
