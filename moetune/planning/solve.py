"""The largest value of one setting with which a run fits; for `hardware.gpu`, the smallest card.

Memory grows along each axis, linearly in layers and experts that are alike and in LoRA ranks. The search evaluates
next where a straight line through the known values crosses the card's size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
"""Step in tokens of a sequence's length, to which attention kernels are aligned."""
_RANK = 8
_MOST_ROWS = 4096


@dataclass(frozen=True)
class Axis:
    """The values of one setting, ordered by the memory that they take.

    Attributes:
        start: index of the value to begin with.
        name: formats a value for a reader.
    """

    key: str
    values: Sequence[Any]
    start: int = 0
    name: Callable[[Any], str] = str


@dataclass(frozen=True)
class Solved:
    """The last value that fits and the first that does not, each with its report; None where there is none."""

    axis: Axis
    value: Any
    at: MemoryReport | None
    beyond: Any
    over: MemoryReport | None

    @property
    def written(self) -> str:
        """The value as a run file has it."""
        return _written(self.value)

    @property
    def settings(self) -> tuple[str, ...]:
        """The setting in the form that `--set` takes."""
        return () if self.at is None else (f"{self.axis.key}={self.written}",)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `moetune plan RUN.yaml --solve KEY --json` prints."""

        def described(value: Any, report: MemoryReport | None) -> dict[str, Any] | None:
            if report is None:
                return None
            return {"value": list(value) if isinstance(value, tuple) else value, **report.figures()}

        return {
            "schema": 1,
            "solve": self.axis.key,
            "settings": list(self.settings),
            "fits": self.at is not None,
            "at": described(self.value, self.at),
            "beyond": described(self.beyond, self.over),
        }


def solve(run: RunConfig | Path | str, key: str, predictor: Predictor | None = None) -> Solved:
    """Find the last value of `key` that fits, by closed form, and confirm it by trace.

    Args:
        run: a run or its file.
        predictor: has the card; by default that of `hardware.gpu`.

    Raises:
        UserError: the key cannot be solved for, the run has no such setting, or no GPU is named.
    """
    config, predictor = run if isinstance(run, RunConfig) else load_run_config(run), predictor or Predictor()
    if key != "hardware.gpu" and (predictor.gpu or config.hardware.gpu) is None:
        raise UserError("--solve needs a card to fit: give --gpu, or hardware.gpu in the run file")
    axis = axis_of(predictor.resolve(config), key)
    if key == "hardware.gpu":
        predictor = replace(predictor, gpu=None)

    def run_with(number: int) -> RunConfig:
        value = axis.values[number]
        return changed(config, {key: list(value) if isinstance(value, tuple) else value})

    last, reports = last_that_fits(len(axis.values), lambda number: predictor.of(run_with(number)), axis.start)
    while last >= 0:
        reports[last] = predictor.traced(run_with(last))
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


def last_that_fits(
    count: int,
    predict: Callable[[int], MemoryReport],
    start: int = 0,
    *,
    margin: int = 0,
    known: Mapping[int, MemoryReport] | None = None,
) -> tuple[int, dict[int, MemoryReport]]:
    """Find the last of the numbers from 0 on that fits, -1 if none; headroom falls from each number to the next.

    Args:
        start: the number that is predicted first.
        margin: bytes that must be left.
        known: 0 with its report, if that fits and was predicted.

    Returns:
        The number, and every report: that of the next number is among them.
    """
    reports = dict(known or {})
    fits, fails, at, tries = len(reports) - 1, count, min(start, count - 1), 0
    while fails - fits > 1:
        reports[at] = predict(at)
        tries += 1
        fits, fails = (at, fails) if headroom(reports[at]) >= margin else (fits, at)
        left = {number: headroom(report) - margin for number, report in reports.items()}
        at = (fits + fails) // 2 if tries % 4 == 0 else _crossing(left, fits, fails, count)
    return fits, reports


def headroom(report: MemoryReport) -> int:
    """Bytes that are left of the card; negative by what is lacking."""
    assert report.headroom_bytes is not None
    return report.headroom_bytes


def _crossing(left: Mapping[int, int], fits: int, fails: int, count: int) -> int:
    """The number at which a straight line through the two known headrooms nearest to zero crosses it."""
    near = sorted(left, key=lambda number: abs(left[number]))[:2]
    if len(near) < 2:
        guess = 2 * near[0] + 1 if fails == count else near[0] // 2
    else:
        one, other = near
        slope = (left[other] - left[one]) / (other - one)
        guess = count if slope >= 0 else int(one - left[one] / slope)
    return min(max(guess, fits + 1), fails - 1)


# --- Axes ---------------------------------------------------------------------------------------------------------

KEYS = (
    "train.micro_batch", "train.eval_micro_batch", "train.sequence_length", "adapt.lora.rank", "adapt.lora.layers",
    "adapt.lora.ids", "adapt.experts.layers", "adapt.experts.ids", "hardware.gpu",
)  # fmt: skip


def axis_of(run: ResolvedRun, key: str) -> Axis:
    """Return the values that a setting of a run may have.

    Raises:
        UserError: the key cannot be solved for, or the run has no such setting.
    """
    if key not in KEYS:
        raise UserError(f"--solve {key!r} is no setting to solve for.{suggest(key, KEYS)} There are: {', '.join(KEYS)}")
    config, structure = run.config, run.structure
    section, _, last = key.rpartition(".")
    if key == "hardware.gpu":
        cards = sorted(gpu_names(), key=lambda name: (-find_gpu(name).memory.value, name))
        return Axis(key, cards, len(cards) // 2, lambda name: find_gpu(name).full_name)
    if key == "train.sequence_length":
        most = getattr(run.model.settings.get_text_config(), "max_position_embeddings", None) or 2**20
        lengths = range(NOTCH, max(most, NOTCH) + 1, NOTCH)
        return Axis(key, lengths, min(max(config.train.sequence_length // NOTCH, 1), len(lengths)) - 1)
    if section == "train":
        now = getattr(config.train, last) or config.train.micro_batch
        return Axis(key, range(1, _MOST_ROWS + 1), min(now, _MOST_ROWS) - 1)
    part: Any = config.adapt.lora if section == "adapt.lora" else config.adapt.experts
    if part is None:
        raise UserError(f"--solve {key}: the run file has no {section}; nothing of it trains")
    if last == "rank":
        linears = structure.linears("attention").values()
        smallest = min(min(linear.in_features, linear.out_features) for linear in linears)
        ranks = [rank for rank in (1, 2, 4) if rank < smallest] + [*range(_RANK, smallest + 1, _RANK)]
        return Axis(key, ranks, sum(rank < part.rank for rank in ranks[:-1]))
    if last == "ids":
        there = [*range(min((layer.shape.num_experts for layer in structure.moe_layers), default=0))]
    elif section == "adapt.lora":
        there = [*range(structure.num_layers)]
    else:
        there = [layer.index for layer in structure.moe_layers]
    return _nested_sets(key, there, getattr(part, last))


def _nested_sets(key: str, there: list[int], chosen: IdSet) -> Axis:
    """The first one, two, … of layers or experts, those that the run file names before all others."""
    named = [number for number in there if chosen == "all" or number in chosen]
    order = named + [number for number in there if number not in named]
    if not order:
        raise UserError(f"--solve {key}: the model has none")
    values = [tuple(sorted(order[:count])) for count in range(1, len(order) + 1)]
    return Axis(key, values, max(len(named), 1) - 1, lambda ids: f"{len(ids)} ({_written(ids)})")


def _written(value: Any) -> str:
    return ranges(value) if isinstance(value, tuple) else str(value)
