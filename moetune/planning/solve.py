"""The largest value of one setting with which a run fits; of the card the smallest.

Memory grows along each axis, so the border between what fits and what does not is looked for where a straight line
through what is known crosses the card's size. In layers and experts that are alike, and in ranks, it is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetune.config.fields import IdSet
from moetune.config.load import load_run_config
from moetune.config.schema import RunConfig
from moetune.errors import UserError, suggest
from moetune.memory.changes import changed
from moetune.memory.report import MemoryReport
from moetune.models.catalog.gpus import find_gpu, gpu_names
from moetune.models.selection import ranges
from moetune.planning.predictor import Predictor
from moetune.run.resolve import ResolvedRun

NOTCH = 64
"""Tokens by which a sequence's length is tried: what attention kernels are aligned to."""
_RANK = 8
_MOST_ROWS = 4096


@dataclass(frozen=True)
class Axis:
    """The values of one setting, from the one that takes least to the one that takes most.

    Attributes:
        start: number of the value to begin with.
        name: what a value is to a reader, where it is not what is written.
    """

    key: str
    values: Sequence[Any]
    start: int = 0
    name: Callable[[Any], str] = str


@dataclass(frozen=True)
class Solved:
    """The last value that fits, or None, and the first that does not, or None; each with its report."""

    axis: Axis
    value: Any
    at: MemoryReport | None
    beyond: Any
    over: MemoryReport | None

    @property
    def settings(self) -> tuple[str, ...]:
        """As `--set` takes them."""
        return () if self.at is None else (f"{self.axis.key}={_written(self.value)}",)

    def to_json(self) -> dict[str, Any]:
        """The object that `moetune plan RUN.yaml --solve KEY --json` prints."""

        def said(value: Any, report: MemoryReport | None) -> dict[str, Any] | None:
            if report is None:
                return None
            return {"value": list(value) if isinstance(value, tuple) else value, **report.figures()}

        return {
            "schema": 1,
            "solve": self.axis.key,
            "settings": list(self.settings),
            "fits": self.at is not None,
            "at": said(self.value, self.at),
            "beyond": said(self.beyond, self.over),
        }


def solve(run: RunConfig | Path | str, key: str, needs: Predictor | None = None) -> Solved:
    """Solves a run file for the value of `key`; `needs` has the card, by default that of `hardware.gpu`.

    Raises:
        UserError: the key cannot be solved for, the run has no such setting, or no GPU is named.
    """
    config, needs = run if isinstance(run, RunConfig) else load_run_config(run), needs or Predictor()
    if key != "hardware.gpu" and (needs.gpu or config.hardware.gpu) is None:
        raise UserError("--solve needs a card to fit: give --gpu, or hardware.gpu in the run file")
    axis = axis_of(needs.resolve(config), key)
    reports: dict[int, MemoryReport] = {}

    def headroom(number: int) -> int:
        reports[number] = _report(config, axis, number, needs)
        found = reports[number].headroom_bytes
        assert found is not None
        return found

    last = last_that_fits(len(axis.values), headroom, axis.start)
    while last >= 0:  # what is recommended is traced
        reports[last] = _report(config, axis, last, needs, traced=True)
        if reports[last].fits:
            break
        last -= 1
    has_more = last + 1 < len(axis.values)
    return Solved(
        axis,
        axis.values[last] if last >= 0 else None,
        reports[last] if last >= 0 else None,
        axis.values[last + 1] if has_more else None,
        reports.get(last + 1) if has_more else None,
    )


def _report(config: RunConfig, axis: Axis, number: int, needs: Predictor, *, traced: bool = False) -> MemoryReport:
    value = axis.values[number]
    if axis.key == "hardware.gpu":
        needs.gpu = value
    else:
        config = changed(config, {axis.key: list(value) if isinstance(value, tuple) else value})
    return needs.traced(config) if traced else needs.of(config)


def last_that_fits(count: int, headroom: Callable[[int], int], start: int = 0, first: int | None = None) -> int:
    """The last of so many numbers from 0 on where there is headroom; -1 if nowhere.

    Args:
        headroom: bytes left at a number; they fall from each number to the next.
        start: the number that is looked at first.
        first: bytes left at 0, if that is known; not negative.
    """
    known: dict[int, int] = {} if first is None else {0: first}
    fits, fails, at, asked = len(known) - 1, count, min(start, count - 1), 0
    while fails - fits > 1:
        known[at] = headroom(at)
        fits, fails = (at, fails) if known[at] >= 0 else (fits, at)
        asked += 1
        at = (fits + fails) // 2 if asked % 4 == 0 else _guess(known, fits, fails, count)
    return fits


def _guess(known: dict[int, int], fits: int, fails: int, count: int) -> int:
    """Where a straight line through the two known numbers next to the border crosses zero."""
    near = sorted(known, key=lambda number: abs(known[number]))[:2]
    if len(near) < 2:
        guess = 2 * near[0] + 1 if fails == count else near[0] // 2
    else:
        one, other = near
        slope = (known[other] - known[one]) / (other - one)
        guess = count if slope >= 0 else int(one - known[one] / slope)
    return min(max(guess, fits + 1), fails - 1)


# --- Axes ---------------------------------------------------------------------------------------------------------


def axis_of(run: ResolvedRun, key: str) -> Axis:
    """The values that a setting of a run may have.

    Raises:
        UserError: it is none that can be solved for, or the run has no such setting.
    """
    config, structure = run.config, run.structure
    section, _, last = key.rpartition(".")
    if key in ("train.micro_batch", "train.eval_micro_batch"):
        now = getattr(config.train, last) or config.train.micro_batch
        return Axis(key, range(1, _MOST_ROWS + 1), min(now, _MOST_ROWS) - 1)
    if key == "train.sequence_length":
        most = getattr(run.model.settings.get_text_config(), "max_position_embeddings", None) or 2**20
        lengths = range(NOTCH, max(most, NOTCH) + 1, NOTCH)
        return Axis(key, lengths, min(max(config.train.sequence_length // NOTCH, 1), len(lengths)) - 1)
    if key == "hardware.gpu":
        cards = sorted(gpu_names(), key=lambda name: (-find_gpu(name).memory.value, name))
        return Axis(key, cards, len(cards) // 2, lambda name: find_gpu(name).full_name)
    if key in ("adapt.lora.rank", "adapt.lora.layers", "adapt.lora.ids", "adapt.experts.layers", "adapt.experts.ids"):
        part = config.adapt.lora if section == "adapt.lora" else config.adapt.experts
        if part is None:
            raise UserError(f"--solve {key}: the run file has no {section}; nothing of it trains")
        if key == "adapt.lora.rank":
            smallest = min(
                min(linear.in_features, linear.out_features) for linear in structure.linears("attention").values()
            )
            ranks = [rank for rank in (1, 2, 4) if rank < smallest] + [*range(_RANK, smallest + 1, _RANK)]
            return Axis(key, ranks, sum(rank < part.rank for rank in ranks[:-1]))  # type: ignore[union-attr]
        if last == "layers":
            is_lora = section == "adapt.lora"
            there = range(structure.num_layers) if is_lora else [layer.index for layer in structure.moe_layers]
        else:
            there = range(min((layer.shape.num_experts for layer in structure.moe_layers), default=0))
        return _first_of(key, list(there), getattr(part, last))
    raise UserError(f"--solve {key!r} is no setting to solve for.{suggest(key, KEYS)} There are: {', '.join(KEYS)}")


KEYS = (
    "train.micro_batch", "train.eval_micro_batch", "train.sequence_length", "adapt.lora.rank", "adapt.lora.layers",
    "adapt.lora.ids", "adapt.experts.layers", "adapt.experts.ids", "hardware.gpu",
)  # fmt: skip


def _first_of(key: str, there: list[int], chosen: IdSet) -> Axis:
    """One, two, … of what is there: those that the run file names first."""
    named = [number for number in there if chosen == "all" or number in chosen]
    order = named + [number for number in there if number not in named]
    if not order:
        raise UserError(f"--solve {key}: the model has none")
    values = [tuple(sorted(order[:count])) for count in range(1, len(order) + 1)]
    return Axis(key, values, max(len(named), 1) - 1, lambda ids: f"{len(ids)} ({_written(ids)})")


def _written(value: Any) -> str:
    """A value as the run file has it."""
    return ranges(value) if isinstance(value, tuple) else str(value)
