"""`moetune plan --solve KEY`: a setting's largest value that fits, or the smallest GPU.

An axis lists the values of a setting by rising memory; fit.py finds the last that fits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moetune.config.fields import IdSet, ranges
from moetune.config.load import load_run_config
from moetune.config.lora_rank import ranks_as_text
from moetune.config.schema import RunConfig
from moetune.errors import UserError, suggest
from moetune.memory.report import MemoryReport
from moetune.models.catalog.gpus import find_gpu, gpu_names
from moetune.planning.fit import headroom, last_that_fits, surely_left
from moetune.planning.predictor import Predictor
from moetune.planning.savings import changed
from moetune.run.resolve import ResolvedRun

NOTCH = 64
"""Step of `train.sequence_length` between the values that are tried, in tokens: attention kernels are aligned to it."""
_RANK = 8
_MOST_ROWS = 4096


@dataclass(frozen=True)
class Axis:
    """The values that one setting may have, in the order of the memory that they take.

    Attributes:
        key: the dotted key of the setting, such as `train.micro_batch`.
        values: the values; those of `ids` and `layers` are tuples of numbers.
        start: index of the value to predict first.
        name: formats a value for a reader.
    """

    key: str
    values: Sequence[Any]
    start: int = 0
    name: Callable[[Any], str] = str


@dataclass(frozen=True)
class Solved:
    """The result of `solve`.

    Attributes:
        axis: the setting and its values.
        value: the last value that fits; None if none fits.
        report: its predicted memory; None if no value fits.
        next_value: the first value that does not fit; None if all fit.
        next_report: its predicted memory; None if all fit.
    """

    axis: Axis
    value: Any
    report: MemoryReport | None
    next_value: Any
    next_report: MemoryReport | None

    @property
    def written(self) -> str:
        """The value as it is written in a run file."""
        return _written(self.value)

    @property
    def settings(self) -> tuple[str, ...]:
        """The setting as `KEY=VALUE` for `--set`; empty if no value fits."""
        return () if self.report is None else (f"{self.axis.key}={self.written}",)

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
            "fits": self.report is not None,
            "at": described(self.value, self.report),
            "beyond": described(self.next_value, self.next_report),
        }


def solve(
    run: RunConfig | Path | str,
    key: str,
    predictor: Predictor | None = None,
    *,
    tight: bool = False,
    show: Callable[[str, MemoryReport], None] = lambda *_: None,
) -> Solved:
    """Find the largest value of a setting with which a run fits a GPU.

    Args:
        run: a configuration, or the path of a run file.
        key: the setting, one of `KEYS`. For `hardware.gpu`, the smallest GPU that the run fits is found.
        predictor: predicts the runs, for the GPU in its `gpu`; by default for `hardware.gpu`.
        tight: whether a run fits if its expected memory does; else the most that it may need must fit.
        show: called with a value's name and its report, once that is predicted.

    Raises:
        UserError: the key is not in `KEYS`, the run file has no such setting, or no GPU is named.
    """
    config, predictor = run if isinstance(run, RunConfig) else load_run_config(run), predictor or Predictor()
    if key != "hardware.gpu" and not (predictor.gpu or config.hardware.names):
        raise UserError("--solve needs a card: give --gpu, or hardware.gpu in the run file")
    axis = axis_of(predictor.resolve(config), key)
    if key == "hardware.gpu":
        predictor = replace(predictor, gpu=None)

    def predict(number: int) -> MemoryReport:
        value = axis.values[number]
        report = predictor.report(changed(config, {key: list(value) if isinstance(value, tuple) else value}))
        show(axis.name(value), report)
        return report

    left = headroom if tight else surely_left
    last, reports = last_that_fits(len(axis.values), predict, left, axis.start)
    values = dict(enumerate(axis.values[max(last, 0) : last + 2], max(last, 0)))
    return Solved(axis, values.get(last), reports.get(last), values.get(last + 1), reports.get(last + 1))


# --- Axes ---------------------------------------------------------------------------------------------------------

KEYS = (
    "train.micro_batch", "train.eval_micro_batch", "train.sequence_length", "adapt.lora.rank", "adapt.lora.layers",
    "adapt.lora.ids", "adapt.experts.layers", "adapt.experts.ids", "hardware.gpu",
)  # fmt: skip


def axis_of(run: ResolvedRun, key: str) -> Axis:
    """Return the values that a setting of a run may have, by rising memory. Raise `UserError` if the key is not in
    `KEYS`, or the run file has no such setting."""
    if key not in KEYS:
        raise UserError(f"--solve {key!r} cannot be solved for.{suggest(key, KEYS)} Choose from: {', '.join(KEYS)}")
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
        raise UserError(f"--solve {key}: the run file has no {section}; add that section")
    if last == "rank" and not isinstance(part.rank, int):
        raise UserError(f"--solve {key}: the run file has several ranks, {ranks_as_text(part.rank)}; give a single one")
    if last == "rank":
        linears = structure.linears("attention").values()
        smallest = min(min(linear.in_features, linear.out_features) for linear in linears)
        ranks = [rank for rank in (1, 2, 4) if rank < smallest] + [*range(_RANK, smallest + 1, _RANK)]
        return Axis(key, ranks, sum(rank < part.rank for rank in ranks[:-1]))
    if last == "ids":
        possible = [*range(min((layer.shape.num_experts for layer in structure.moe_layers), default=0))]
    elif section == "adapt.lora":
        possible = [*range(structure.num_layers)]
    else:
        possible = [layer.index for layer in structure.moe_layers]
    return _nested_sets(key, possible, getattr(part, last))


def _nested_sets(key: str, possible: list[int], chosen: IdSet) -> Axis:
    """Return an axis of growing sets of layers or experts: the first one, the first two, and so on.

    Args:
        key: the dotted key of the setting.
        possible: the numbers of all layers or experts of the model.
        chosen: those in the run file, which come first.

    Raises `UserError` if `possible` is empty.
    """
    named = [number for number in possible if chosen == "all" or number in chosen]
    order = named + [number for number in possible if number not in named]
    if not order:
        raise UserError(f"--solve {key}: the model has no MoE layers")
    values = [tuple(sorted(order[:count])) for count in range(1, len(order) + 1)]
    return Axis(key, values, max(len(named), 1) - 1, lambda ids: f"{len(ids)} ({_written(ids)})")


def _written(value: Any) -> str:
    """Return a value as it is written in a run file, such as `0-5` for a tuple."""
    return ranges(value) if isinstance(value, tuple) else str(value)
