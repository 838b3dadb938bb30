"""When memory runs out: predicted beside what was there at that moment, whose it was, and what would have fitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moetune.adapt.build import Adapted
from moetune.errors import DoesNotFit
from moetune.memory.allocator import WORKSPACES
from moetune.memory.changes import Remedy
from moetune.memory.live import Owned, Process, Refused, owned, processes_on
from moetune.memory.report import PART_NAMES, PartName, Parts
from moetune.memory.trace import Trace, trace
from moetune.memory.verify import catalog_name
from moetune.models.catalog.gpus import find_gpu
from moetune.planning.remedy import remedies
from moetune.report.units import gib
from moetune.run.resolve import ResolvedRun
from moetune.training.optim.optimizers import CombinedOptimizer
from moetune.training.step.observer import Where

_LARGEST = 8
_WORKING: tuple[PartName, ...] = ("saved_activations", "transient_peak")
"""What cannot be told apart by looking at it: both are reported together."""


@dataclass(frozen=True)
class OutOfMemory:
    """What was found. Bytes by part; `predicted` is of the fullest moment of that phase, None where there is none."""

    where: Where
    refused: Refused
    actual: dict[str, int]
    predicted: dict[str, int] | None
    predicted_peak: int | None
    largest: tuple[Owned, ...]
    others: tuple[Process, ...]
    settings: tuple[Remedy, ...]
    checkpoint: str | None

    def to_json(self) -> dict[str, Any]:
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
                "settings": [{"flags": list(one.flags), "required": one.report.required} for one in self.settings],
            },
            "last_checkpoint": self.checkpoint,
        }

    def error(self) -> DoesNotFit:
        """What ends the run."""
        return DoesNotFit("\n".join(self.lines()), self.to_json())

    def lines(self) -> Iterator[str]:
        where, refused = self.where, self.refused
        moment = "while the weights were loaded"
        if where.phase in ("forward", "backward"):
            moment = f"in step {where.step}, micro-step {where.micro_step}, {where.phase}"
        elif where.phase != "load":
            moment = f"in step {where.step}, {where.phase}"
        yield (
            f"out of memory {moment}: {gib(refused.wanted)} asked for, {gib(refused.allocated)} in use of "
            f"{gib(refused.available)} that there were"
        )
        yield f"  {'':26}{'actual':>12}{'predicted':>12}"
        for name, size in self.actual.items():
            said = "" if self.predicted is None else gib(self.predicted[name])
            yield f"  {name.replace('_', ' '):26}{gib(size):>12}{said:>12}"
        if self.predicted_peak is not None:
            yield f"  the peak that was predicted: {gib(self.predicted_peak)}"
        yield "largest:"
        for one in self.largest:
            yield f"  {gib(one.bytes):>12}  {one.storages} × {one.name}"
        for process in self.others:
            yield f"also on the card: process {process.pid} ({process.name}), {gib(process.bytes)}"
        if self.settings:
            yield "would have fitted, each by itself:"
        for remedy in self.settings:
            yield f"  {' '.join(f'--set {flag}' for flag in remedy.flags)}    # needs {gib(remedy.report.required)}"
        if where.phase != "load" and self.checkpoint is None:
            yield "there is no checkpoint yet"
        elif self.checkpoint is not None:
            yield (
                f"the last checkpoint, {self.checkpoint}, is whole: --resume auto --set "
                "train.on_oom=halve_micro_batch goes on from it in smaller pieces"
            )


def examine(
    run: ResolvedRun,
    refused: Refused,
    where: Where,
    device: torch.device,
    adapted: Adapted | None = None,
    optimizer: CombinedOptimizer | None = None,
    checkpoint: str | None = None,
) -> OutOfMemory:
    """Looks at what was there when memory ran out, and predicts it.

    Args:
        adapted, optimizer: as far as they were made.
        checkpoint: the last one.
    """
    card = find_gpu(catalog_name(device)) if device.type == "cuda" else None
    groups = owned(refused, adapted, optimizer)
    of_part = dict.fromkeys(PART_NAMES, 0)
    for group in groups:
        of_part[group.part] += group.bytes
    predicted, peak, settings = None, None, list[Remedy]()
    if run.config.parallel.ranks == 1:  # one of several cannot record a step while it runs
        try:
            traced = trace(run, gpu=card)
            beside = 0 if card is None else WORKSPACES * card.cublas_workspace.value
            predicted, peak = _words(parts_at(traced, where, beside)), traced.parts().total + beside
            most = max(peak, predicted["allocated"])  # while weights load, too
            lacking = refused.lacking + max(0, most - refused.reached)
            settings = remedies(run, card or find_gpu("l40s"), lacking)
        except Exception:  # what cannot be predicted is not; what is known is said
            pass
    me = torch.multiprocessing.current_process().pid
    others = [process for process in processes_on(device) if process.pid != me] if device.type == "cuda" else []
    return OutOfMemory(
        where,
        refused,
        _words(Parts(**of_part)),
        predicted,
        peak,
        tuple(groups[:_LARGEST]),
        tuple(others),
        tuple(settings),
        checkpoint,
    )


def parts_at(traced: Trace, where: Where, beside: int = 0) -> Parts:
    """The fullest moment of a phase, as it was traced. A micro-step beyond those that were is like the last of them.

    Args:
        beside: bytes that are there beside what is traced.
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
    found = next((fullest[name] for name in (*names, where.phase) if name in fullest), traced.parts())
    return replace(found, transient_peak=found.transient_peak + beside)


def _words(parts: Parts) -> dict[str, int]:
    """By name, what is known of each part, and the sum."""
    known: dict[str, int] = {name: size for name, size in parts.items() if name not in _WORKING}
    working = sum(getattr(parts, name) for name in _WORKING)
    return {**known, "activations_and_temporaries": working, "allocated": parts.total}
