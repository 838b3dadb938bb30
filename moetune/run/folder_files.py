"""Types of `metrics.jsonl`, `memory.json` and `drift.json`, and readers of the first two (run_folder.py)."""

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import AfterValidator, ConfigDict, Field
from typing_extensions import TypedDict

from moetune.errors import UserError, reading
from moetune.json_files import Amount, Answer, Number, parse_json, read_json

_REMEDY = "delete that line, if this is a run's metrics.jsonl"
_LARGEST = 1e300  # so that sums and shares of such numbers are finite


def _check_load(load: list[float]) -> list[float]:
    """Return the load; raise `ValueError` if a count is negative or not finite, or if all are 0."""
    if not 0 < sum(load) < _LARGEST or min(load) < 0:
        raise ValueError("a layer's counts are numbers from 0 up, and not all 0")
    return load


ExpertLoad = dict[Amount, Annotated[list[float], Field(min_length=1), AfterValidator(_check_load)]]
"""Layer index -> number of tokens that each expert received."""
_Loss = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]


class MetricsLine(TypedDict, total=False):
    """A line of `metrics.jsonl`: a logged training step or an evaluation (`eval_loss`). Further keys are kept."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    step: Annotated[int, Field(ge=0, lt=2**53)]
    loss: _Loss | None
    eval_loss: _Loss | None
    lr: _Loss | None
    grad_norm: _Loss | None
    tokens_per_second: Annotated[float, Field(ge=0, le=_LARGEST)] | None
    skipped_steps: Amount | None


class _Predicted(TypedDict):
    """Predicted peaks of allocated bytes, with an even load of experts and (`as_routed`) with the measured load."""

    peak_allocated: Amount | None
    as_routed: Amount | None


class _Measured(TypedDict):
    """Measured peaks in bytes, as torch's allocator counts them."""

    peak_allocated: Amount | None
    peak_reserved: Amount | None


class MemoryFile(TypedDict):
    """`memory.json` of a run folder: predicted and measured peak memory in bytes, and the tokens per expert."""

    device: str
    steps: Amount
    predicted: _Predicted
    measured: _Measured
    expert_load: ExpertLoad


@dataclass(frozen=True)
class LayerDrift:
    """How the routing of one layer changed.

    Attributes:
        before, after: the number of tokens that each expert received before and after training, by expert id.
        distance: Jensen-Shannon distance of the two loads, base 2: 0 if they are equal, 1 if they have no expert in
            common (Endres and Schindelin, "A new metric for probability distributions", 2003).
        changed: the share of tokens whose set of top-k experts is not the same, from 0 to 1.
        died: ids of experts that received tokens before training and none after.
        came: ids of experts that received tokens after training and none before.
    """

    before: Annotated[tuple[Amount, ...], Field(min_length=1)]
    after: Annotated[tuple[Amount, ...], Field(min_length=1)]
    distance: Number
    changed: Number
    died: tuple[Amount, ...]
    came: tuple[Amount, ...]


@dataclass(frozen=True)
class Drift(Answer):
    """How the routing of a model changed in a run: the content of `drift.json`.

    Attributes:
        run: path of the run folder.
        step: step of the checkpoint that was compared with the base.
        data: the data set whose tokens were routed.
        tokens: number of tokens that were compared.
        changed: share of these tokens, 0 to 1, whose experts changed in at least one layer.
        layers: layer index -> drift, for the layers with experts.
    """

    run: str
    step: Amount
    data: str
    tokens: Amount
    changed: Number
    layers: Annotated[dict[Amount, LayerDrift], Field(min_length=1)]

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "layers": {str(index): asdict(drift) for index, drift in self.layers.items()}}


class _WithLoad(TypedDict):
    expert_load: Annotated[ExpertLoad, Field(min_length=1)]


def read_expert_load(file: Path, what: str) -> dict[int, tuple[float, ...]]:
    """Return layer index -> tokens of each expert, from the key `expert_load` of a JSON file such as `memory.json`.

    Args:
        what: the key of the run file or the option that names the file, for messages.

    Raises:
        UserError: the file cannot be read or has no such key.
    """
    remedy = "it holds {'expert_load': {layer: [tokens of each expert]}}"
    stored = read_json(file, _WithLoad, f"{what} {str(file)!r}", remedy)
    return {layer: tuple(load) for layer, load in stored["expert_load"].items()}


def read_metrics(file: Path) -> list[MetricsLine]:
    """Read a `metrics.jsonl` file and parse it with `parse_metrics`; raise `UserError` if it cannot be read."""
    with reading(repr(str(file))):
        text = file.read_bytes()
    return parse_metrics(text, file)


def parse_metrics(text: bytes, file: Path) -> list[MetricsLine]:
    """Parse the text of `metrics.jsonl`, named `file` in messages; leave out a last line that was not fully written.

    Raises:
        UserError: another line is no JSON object with a `step` and keys of the types of `MetricsLine`.
    """
    *whole, last = text.split(b"\n")
    lines = [_line(line, f"{str(file)!r}, line {number:,}") for number, line in enumerate(whole, 1) if line.strip()]
    with suppress(UserError):
        lines += [_line(last, "")] if last.strip() else []
    return lines


def _line(line: bytes, what: str) -> MetricsLine:
    parsed = cast("dict[str, Any]", parse_json(line, MetricsLine, what, _REMEDY))
    if "step" not in parsed:
        raise UserError(f"{what} has no step; {_REMEDY}")
    return cast("MetricsLine", parsed)
