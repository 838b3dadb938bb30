"""What would make a run fit, where no single change does: changes that are combined until it does."""

from __future__ import annotations

from dataclasses import dataclass

from moetune.config import RunConfig
from moetune.errors import UserError
from moetune.memory.changes import Candidate, candidates, is_on_host
from moetune.memory.report import MemoryReport
from moetune.planning.needs import Needs, changed

_MOST = 6
_LOWEST = 8


@dataclass(frozen=True)
class Combination:
    """Changes of a run file, why each helps, and what the run then needs."""

    settings: dict[str, object]
    why: tuple[str, ...]
    report: MemoryReport

    @property
    def flags(self) -> tuple[str, ...]:
        """As `--set` takes them."""
        return tuple(f"{key}={value}" for key, value in self.settings.items())


def combination(config: RunConfig, report: MemoryReport, needs: Needs, shortest: int = 512) -> Combination | None:
    """Changes that make a run fit together, none of which can be left out; None if none are known.

    What moves to the host slows every step, so it is taken only where the rest cannot be enough.

    Args:
        report: of the run, which does not fit.
        shortest: a sequence's length is not halved below this.
    """
    if report.gpu is None or report.fullest.outside_allocator >= report.gpu.usable_bytes:
        return None  # whatever the run file says
    for host_first in (False, True):
        if (found := _taken_together(config, report, needs, shortest, host_first)) is not None:
            return found
    return None


def _taken_together(
    config: RunConfig, report: MemoryReport, needs: Needs, shortest: int, host_first: bool
) -> Combination | None:
    """One change after the other, until it fits; then those that are not needed are left out."""
    taken: list[Candidate] = []
    refused: set[str] = set()

    def with_all(chosen: list[Candidate]) -> RunConfig:
        return changed(config, {key: value for one in chosen for key, value in one.settings.items()})

    now = report
    while now.fits is False and len(taken) < _MOST:
        current = with_all(taken)
        there = [one for one in candidates(current) if str(one.settings) not in refused and _is_allowed(one, shortest)]
        if not there:
            return None
        one = _likeliest(there, now, host_first)
        refused.add(str(one.settings))
        try:
            after = needs.of(with_all([*taken, one]))
        except UserError:  # the run file cannot have it
            continue
        if after.required < now.required:
            taken, now = [*taken, one], after
    if now.fits is False:
        return None
    for one in taken[:-1]:
        rest = [other for other in taken if other is not one]
        try:
            without = needs.of(with_all(rest))
        except UserError:
            continue
        if without.fits:
            taken, now = rest, without
    settings = {key: value for one in taken for key, value in one.settings.items()}
    return Combination(settings, tuple(one.why for one in taken), now)


def _is_allowed(one: Candidate, shortest: int) -> bool:
    """Whether what is left is still worth training: not too short, nor of too low a rank."""
    length, rank = one.settings.get("train.sequence_length", shortest), one.settings.get("adapt.lora.rank", _LOWEST)
    return isinstance(length, int) and length >= shortest and isinstance(rank, int) and rank >= _LOWEST


def _likeliest(there: list[Candidate], now: MemoryReport, host_first: bool) -> Candidate:
    """The one that acts on most of the peak; one that slows every step only if all others together are too little."""
    assert now.headroom_bytes is not None
    here = [one for one in there if not is_on_host(one)]
    most = sum(getattr(now.fullest.parts, part) for part in {part for one in here for part in one.parts})
    if host_first or most < -now.headroom_bytes:
        here = [one for one in there if is_on_host(one)] or here
    return max(here or there, key=lambda one: sum(getattr(now.fullest.parts, part) for part in one.parts))
