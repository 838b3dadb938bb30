"""`Speeds`: what calls took on a card (`moetune doctor --measure`), and the roofline's factors that follow from it.

Each point is a call whose work is counted as in a trace. With the limits of the card's data sheet it says which share
of a limit was reached, or how long a launch took. How far a further call may be off is seen by cross-validation: each
point is left out in turn, and the range of all points is widened by the ratio by which it lies outside the others'.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import torch

from moetune.adapt.guard.verdicts import driver_here
from moetune.cache import cache_folder, read_cached, write_cached
from moetune.errors import UserError
from moetune.memory.time.work import Work
from moetune.models.catalog.gpus import Gpu

Kind = Literal["products", "attention", "memory", "unpacking", "link", "launch", "synchronization"]
"""What a call is bound by: products of experts and linear layers, attention's kernels, the card's memory, the kernels
that dequantize, the link to the host, the host's launches, and its waits."""
KINDS: tuple[Kind, ...] = get_args(Kind)
PER_EVENT: tuple[Kind, ...] = ("launch", "synchronization")
"""Kinds whose factor is seconds of an event; the others' is a share of a limit."""


@dataclass(frozen=True)
class Point:
    """One measured call: what bounds it, its description, its counted work (field of `Work` -> value), its seconds."""

    kind: Kind
    what: str
    work: dict[str, float]
    seconds: float

    def factor(self, card: Gpu) -> float:
        """Return the share of the card's limit that was reached, or the seconds of each launch or wait."""
        work = Work(**self.work)
        if self.kind in PER_EVENT:
            return self.seconds / (work.launches if self.kind == "launch" else work.synchronizations)
        half = card.bf16 or card.fp16
        assert half is not None
        assert card.fp32 is not None
        assert card.bandwidth is not None
        assert card.host_link is not None
        arithmetic = (work.flops + work.idle) / half.value + work.flops32 / card.fp32.value
        memory = (work.bytes + (0 if arithmetic else work.product_bytes)) / card.bandwidth.value
        return (arithmetic + memory + work.copied / card.host_link.value) / self.seconds


@dataclass(frozen=True)
class Between:
    """The range of a factor: its values at the fast and at the slow end of an estimate."""

    fast: float
    slow: float


@dataclass(frozen=True)
class Speeds:
    """Calls that were measured on a card.

    Attributes:
        card: name and compute capability of the GPU, such as `NVIDIA L40S, 8.9`.
        driver, versions: version of its driver; package -> version, of torch.
        points: the calls.
    """

    card: str
    driver: str
    versions: dict[str, str]
    points: tuple[Point, ...]

    @classmethod
    def here(cls, device: torch.device, points: tuple[Point, ...] = ()) -> "Speeds":
        """Return `points` as measured on a GPU of this machine, with its present driver and torch."""
        major, minor = torch.cuda.get_device_capability(device)
        card = f"{torch.cuda.get_device_name(device)}, {major}.{minor}"
        return cls(card, driver_here(), {"torch": torch.__version__}, points)

    @property
    def file(self) -> Path:
        """Path of the file for the points of this card, driver and version of torch, in the cache folder."""
        key = json.dumps([self.card, self.driver, self.versions], sort_keys=True)
        return cache_folder("speeds") / f"speeds-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json.gz"

    def keep(self) -> None:
        """Write the points to `file`. Raises `UserError` if it cannot be written."""
        write_cached(self.file, Speeds, self)
        if read_cached(self.file, Speeds) != self:
            raise UserError(f"{str(self.file)!r} cannot be written; set MOETUNE_CACHE to a folder that can")
        _kept.cache_clear()

    def factors(self, card: Gpu) -> dict[Kind, Between]:
        """Return kind -> range of its factor: the share of the card's limit that is reached, at most 1, or the seconds
        of an event (`PER_EVENT`). Kinds without points are left out. All limits of `card` must be known."""
        return {kind: self._range(kind, card) for kind in KINDS if any(one.kind == kind for one in self.points)}

    def _range(self, kind: Kind, card: Gpu) -> Between:
        values = sorted(one.factor(card) for one in self.points if one.kind == kind)
        low, high = values[0], values[-1]
        if len(values) > 1:  # what is left out lies outside of the others only if it is the lowest or the highest
            wider = max(1.0, values[1] / low, high / values[-2])
            low, high = low / wider, high * wider
        return Between(low, high) if kind in PER_EVENT else Between(min(high, 1.0), low)


def speeds_of(card: Gpu) -> Speeds | None:
    """Read what was measured on a card; None if it is not this machine's first GPU, or there is no measurement with the
    present driver and torch."""
    if not torch.cuda.is_available() or card.full_name != torch.cuda.get_device_name(0):
        return None
    return _kept()


@cache  # a choice of activations asks for every layer
def _kept() -> Speeds | None:
    here = Speeds.here(torch.device("cuda", 0))
    found: Speeds | None = read_cached(here.file, Speeds)
    return found if found is not None and replace(found, points=()) == here else None
