"""`moetune verify`: a prediction compared with real steps; at most 5 % apart passes."""

from dataclasses import dataclass
from typing import Any

import torch

from moetune.adapt.guard import checked
from moetune.errors import UserError
from moetune.memory.allocator import allocator_here
from moetune.memory.assumed_routing import AssumedRouting
from moetune.memory.measurement.measure import catalog_name, measure
from moetune.memory.predict import predict_memory
from moetune.memory.trace import trace
from moetune.planning.settle import settled_on
from moetune.run.dtypes import device_kind
from moetune.run.resolve import AnyRun, resolve

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
        remedy = "train two steps on them, and read memory.json of the run folder"
        raise UserError(f"parallel: makes {run.config.parallel.ranks} ranks, but verify measures one process; {remedy}")
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
        report = predict_memory(run, gpu=card, routing=routing, allocator=allocator)
        predicted = {name: getattr(report.fullest, name) for name in _NAMES}
    return Outcome(
        predicted=predicted,
        measured={name: getattr(measured, name) for name in predicted},
        tokens_per_second=round(measured.tokens_per_second, 1),
        device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        routing=routing.name,
    )
