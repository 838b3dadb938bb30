"""The report of a run out of memory: actual beside predicted, largest tensors, remedies."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from moetune.adapt.build import Adapted
from moetune.errors import DoesNotFit
from moetune.memory.assumed_routing import BALANCED
from moetune.memory.host import this_machine
from moetune.memory.measurement.live import Owned, Process, Refused, owned, processes_on
from moetune.memory.measurement.measure import catalog_name
from moetune.memory.report import PART_NAMES, PartName, Parts
from moetune.memory.trace import Trace, trace
from moetune.models.catalog.gpus import Figure, Gpu, find_gpu
from moetune.planning.fit import headroom
from moetune.planning.predictor import Predictor
from moetune.planning.savings import Remedy, fitting
from moetune.report.units import gib
from moetune.run.resolve import ResolvedRun
from moetune.training.optim.optimizers import CombinedOptimizer
from moetune.training.step.observer import Where

_LARGEST = 8
_WORKING: tuple[PartName, ...] = ("saved_activations", "transient_peak")
"""Parts of a prediction of which a live tensor shows neither: the report adds them up."""


@dataclass(frozen=True)
class OutOfMemory:
    """The state of the memory when it ran out, and what would have fitted.

    Attributes:
        where: the step, micro-step and phase in which it ran out.
        refused: the allocation that failed, and the state of the device.
        actual: part -> bytes in use; `activations_and_temporaries` is one part, and `allocated` the sum of all.
        predicted: bytes predicted for the fullest moment of this phase, in the same form; None without a prediction.
        predicted_peak: predicted bytes at the peak of the whole run; None without a prediction.
        largest: the largest groups of tensors.
        others: other processes on the GPU.
        remedies: changes of the run file, each of which would have been enough.
        checkpoint: the folder of the last checkpoint; None if there is none.
    """

    where: Where
    refused: Refused
    actual: dict[str, int]
    predicted: dict[str, int] | None
    predicted_peak: int | None
    largest: list[Owned]
    others: list[Process]
    remedies: list[Remedy]
    checkpoint: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the report as the object that `moetune train --json` prints."""
        return {
            "schema": 1,
            "out_of_memory": {
                "step": self.where.step,
                "micro_step": self.where.micro_step,
                "phase": self.where.phase,
                "wanted_bytes": self.refused.wanted,
                "allocated_bytes": self.refused.allocated,
                "available_bytes": self.refused.available,
                "actual": self.actual,
                "predicted": self.predicted,
                "predicted_peak_allocated": self.predicted_peak,
                "largest": [group._asdict() for group in self.largest],
                "processes": [process._asdict() for process in self.others],
                "settings": [{"flags": list(fix.flags), "required": fix.report.required} for fix in self.remedies],
            },
            "last_checkpoint": self.checkpoint,
        }

    def error(self) -> DoesNotFit:
        """Return the exception that ends the run, with the report as its message and as JSON."""
        return DoesNotFit("\n".join(self.lines()), self.to_json())

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        where, refused = self.where, self.refused
        micro_step = f"micro-step {where.micro_step}, " if where.phase in ("forward", "backward") else ""
        moment = f"in step {where.step}, {micro_step}{where.phase}"
        moment = "before the first step" if where.phase == "load" else moment
        wanted, allocated, available = map(gib, (refused.wanted, refused.allocated, refused.available))
        yield f"out of memory {moment}: {wanted} requested, {allocated} of {available} in use"
        yield f"  {'':26}{'actual':>12}{'predicted':>12}"
        for name, size in self.actual.items():
            predicted = "" if self.predicted is None else gib(self.predicted[name])
            yield f"  {name.replace('_', ' '):26}{gib(size):>12}{predicted:>12}"
        if self.predicted_peak is not None:
            yield f"  predicted peak of the run: {gib(self.predicted_peak)}"
        yield "largest groups of tensors:"
        for group in self.largest:
            yield f"  {gib(group.bytes):>12}  {group.storages} × {group.name}"
        for process in self.others:
            yield f"also on the GPU: process {process.pid} ({process.name}), {gib(process.bytes)}"
        if self.remedies:
            yield "each of these changes alone would have been enough:"
        for remedy in self.remedies:
            yield f"  {' '.join(f'--set {flag}' for flag in remedy.flags)}    # needs {gib(remedy.report.required)}"
        if self.checkpoint is not None:
            yield (
                f"continue from the last checkpoint, {self.checkpoint}, in smaller micro-batches: --resume auto --set "
                "train.on_oom=halve_micro_batch"
            )
        elif where.phase != "load":
            yield "there is no checkpoint yet"


def describe_out_of_memory(
    run: ResolvedRun,
    refused: Refused,
    where: Where,
    device: torch.device,
    adapted: Adapted | None = None,
    optimizer: CombinedOptimizer | None = None,
    checkpoint: str | None = None,
) -> OutOfMemory:
    """Describe the memory at the moment when it ran out, predict it, and look for remedies.

    If the prediction fails, or the run has several ranks, the report has no prediction and no remedies.

    Args:
        refused: the allocation that failed, with the storages that were alive then.
        where: the step, micro-step and phase in which it failed.
        adapted, optimizer: None if they were not built yet.
        checkpoint: the folder of the last checkpoint; None if there is none.
    """
    card = find_gpu(catalog_name(device)) if device.type == "cuda" else None
    groups = owned(refused, adapted, optimizer)
    of_part = dict.fromkeys(PART_NAMES, 0)
    for group in groups:
        of_part[group.part] += group.bytes
    predicted, peak, sufficient = None, None, list[Remedy]()
    if run.config.parallel.ranks == 1:  # a rank of several cannot trace a step while it runs
        with suppress(Exception):  # if the prediction fails, the rest is still reported
            traced = trace(run, gpu=card)
            beside = sum(traced.workspaces(card))
            predicted, peak = _by_name(parts_at(traced, where, beside)), traced.parts().total + beside
            most = max(peak, predicted["allocated"])  # loading the weights may need more than any step
            sufficient = remedies(run, card or find_gpu("l40s"), refused.lacking + max(0, most - refused.reached))
    others = [proc for proc in processes_on(device) if proc.pid != os.getpid()] if device.type == "cuda" else []
    actual = _by_name(Parts(**of_part))
    return OutOfMemory(where, refused, actual, predicted, peak, groups[:_LARGEST], others, sufficient, checkpoint)


def remedies(run: ResolvedRun, card: Gpu, lacking: int) -> list[Remedy]:
    """Return changes of the run file, each enough by itself, with which a run that ran out of memory would have fitted,
    the mildest first; if there is none, one combination of changes.

    The run's own prediction less `lacking` is taken to be the memory that there was, because other programs may use
    part of the GPU, and a run may need more than is predicted; this accounts for the actual routing, too. What a change
    moves to host memory must fit there.

    Args:
        card: the GPU on which the run ran out of memory.
        lacking: bytes by which the memory was too small for the run.

    Raises:
        UserError: the run cannot be predicted.
    """
    predictor = Predictor(card, BALANCED, device_type=run.device_type)
    available = Figure(predictor.quick(run.config).required - lacking, "what there was")
    predictor = replace(predictor, gpu=replace(card, memory=available))
    report, host = predictor.quick(run.config), this_machine()

    def has_room(remedy: Remedy) -> bool:
        moved = (remedy.report.fullest.host_bytes - report.fullest.host_bytes) * run.config.parallel.ranks
        return host is None or moved <= host.value

    return [*filter(has_room, fitting(run.config, report, predictor.quick, headroom))]


def parts_at(traced: Trace, where: Where, beside: int = 0) -> Parts:
    """Return the predicted bytes of each part at the fullest moment of the phase and micro-step `where`.

    A trace has at most two micro-steps; the second stands for all later ones. `beside` are bytes that a trace does not
    contain, such as cuBLAS workspaces; they are added to `transient_peak`. Of the phase `load`, only
    `frozen_weights` are known.
    """
    if where.phase == "load":
        assert traced.load is not None
        return Parts(frozen_weights=traced.load.gpu)
    fullest: dict[str, Parts] = {}
    label = ""
    for sample in traced.timeline():
        label = sample.label or label
        if label not in fullest or sample.parts.total > fullest[label].total:
            fullest[label] = sample.parts
    names: Sequence[str] = [f"{where.phase} {number}" for number in range(where.micro_step, -1, -1)]
    parts = next((fullest[name] for name in (*names, where.phase) if name in fullest), traced.parts())
    return replace(parts, transient_peak=parts.transient_peak + beside)


def _by_name(parts: Parts) -> dict[str, int]:
    """Return part -> bytes, with saved activations and transient peak as one part, `activations_and_temporaries`, and
    the sum of all as `allocated`."""
    known: dict[str, int] = {name: size for name, size in parts.items() if name not in _WORKING}
    working = sum(getattr(parts, name) for name in _WORKING)
    return {**known, "activations_and_temporaries": working, "allocated": parts.total}
