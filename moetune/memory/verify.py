"""Predicted beside measured: on a CPU by the tracker of the trace, on CUDA by torch's counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moetune.errors import UserError
from moetune.memory.measure import measure
from moetune.memory.predict import allocator_here, predict
from moetune.memory.routing import Routing
from moetune.memory.trace import trace
from moetune.models.catalog.gpus import find_gpu
from moetune.run.dtypes import kind_of
from moetune.run.resolve import AnyRun, resolve

TOLERANCE = 0.05
"""How far a prediction may be from what was measured before that is a finding."""


@dataclass(frozen=True)
class Outcome:
    """Bytes, by name: `peak_allocated`, on CUDA `peak_reserved` and `peak_process`, and `host_bytes`, which a CPU run
    measures; None where there is no such number."""

    predicted: dict[str, int | None]
    measured: dict[str, int | None]
    tokens_per_second: float
    device: str
    routing: str

    @property
    def holds(self) -> bool:
        """Whether the prediction of what is allocated was within `TOLERANCE`."""
        before, after = self.predicted["peak_allocated"], self.measured["peak_allocated"]
        assert before is not None
        assert after is not None
        return abs(before / after - 1) <= TOLERANCE

    def to_json(self) -> dict[str, Any]:
        """The object that `moetune verify --json` prints."""
        return {"schema": 1, **self.__dict__, "holds": self.holds}


def verify(
    run: AnyRun, steps: int, routing: Routing | None = None, device: torch.device | str | None = None
) -> Outcome:
    """Takes `steps` real steps with random weights and predicts them.

    Args:
        run: if it is resolved, for the kind of `device`.
        routing: what the prediction assumes; by default what the experts of the real steps received, call by call.
        device: by default the first of the kind that the run is resolved for.

    Raises:
        UserError: as `build`; there are several ranks, or no such device.
    """
    run = resolve(run, kind_of(device))
    if run.config.parallel.ranks > 1:
        raise UserError(
            f"parallel: makes {run.config.parallel.ranks} ranks, and verify measures one process; train with them for "
            "two steps: memory.json in the run folder has what was predicted and measured"
        )
    device = run.device(device)
    measured = measure(run, device, steps)
    routing = routing or measured.routing
    if device.type == "cpu":
        traced = trace(run, routing)
        peak = traced.parts(traced.peak).total
        predicted = {
            "peak_allocated": peak,
            "peak_reserved": None,
            "peak_process": None,
            "host_bytes": traced.host_peak,
        }
    else:
        card, allocator = catalog_name(device), allocator_here()
        rank = predict(run, method="trace", gpu=card, routing=routing, allocator=allocator).fullest
        names = ("peak_allocated", "peak_reserved", "peak_process", "host_bytes")
        predicted = {name: getattr(rank, name) for name in names}
    return Outcome(
        predicted=predicted,
        measured={name: getattr(measured, name) for name in predicted},
        tokens_per_second=round(measured.tokens_per_second, 1),
        device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        routing=routing.name,
    )


def catalog_name(device: torch.device) -> str:
    """The catalog's name of the card, or its size."""
    name = torch.cuda.get_device_name(device)
    try:
        return find_gpu(name).name
    except UserError:
        return f"{torch.cuda.get_device_properties(device).total_memory}B"
