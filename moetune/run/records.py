"""Files of a run folder that are read back: `metrics.jsonl`, `memory.json`, `drift.json`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import AfterValidator, ConfigDict, Field
from typing_extensions import TypedDict

from moetune.documents import Amount, Number, parse_json, read_json
from moetune.errors import UserError, reading

_REMEDY = "delete that line, if this is a run's metrics.jsonl"
_LARGEST = 1e300  # sums and shares of such are finite


def _check_load(load: list[float]) -> list[float]:
    if not 0 < sum(load) < _LARGEST or min(load) < 0:
        raise ValueError("a layer's counts are numbers from 0 up, and not all 0")
    return load


ExpertLoad = dict[Amount, Annotated[list[float], Field(min_length=1), AfterValidator(_check_load)]]
"""Layer index -> tokens that each expert received."""
_Loss = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]


class MetricsLine(TypedDict, total=False):
    """One line of `metrics.jsonl`, of a logged step or of an evaluation; further keys are kept."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    step: Annotated[int, Field(ge=0, lt=2**53)]
    loss: _Loss | None
    eval_loss: _Loss
    lr: _Loss | None
    grad_norm: _Loss | None
    tokens_per_second: Annotated[float, Field(ge=0, le=_LARGEST)] | None
    skipped_steps: Amount | None


class _Predicted(TypedDict):
    peak_allocated: Amount | None
    as_routed: Amount | None


class _Measured(TypedDict):
    peak_allocated: Amount | None
    peak_reserved: Amount | None


class MemoryFile(TypedDict):
    """`memory.json`."""

    device: str
    steps: Amount
    predicted: _Predicted
    measured: _Measured
    expert_load: ExpertLoad


class _LayerDrift(TypedDict):
    before: Annotated[list[Amount], Field(min_length=1)]
    after: Annotated[list[Amount], Field(min_length=1)]
    distance: Number
    changed: Number
    died: list[Amount]
    came: list[Amount]


class DriftFile(TypedDict):
    """`drift.json`, as far as it is shown on a page."""

    step: Amount
    tokens: Amount
    layers: Annotated[dict[Amount, _LayerDrift], Field(min_length=1)]


class _WithLoad(TypedDict):
    expert_load: Annotated[ExpertLoad, Field(min_length=1)]


def read_load(file: Path, what: str) -> dict[int, tuple[float, ...]]:
    """Return layer index -> tokens that each expert received, of `{"expert_load": {"<layer>": [tokens, ...]}}`, which
    `memory.json` holds.

    Raises:
        UserError: the file, named by the key or option `what`, does not hold that.
    """
    remedy = "it holds {'expert_load': {layer: [tokens of each expert]}}"
    found = read_json(file, _WithLoad, f"{what} {str(file)!r}", remedy)
    return {layer: tuple(load) for layer, load in found["expert_load"].items()}


def read_metrics(file: Path) -> list[MetricsLine]:
    """Read `metrics.jsonl`; raise `UserError` as `parse_metrics`, or if it cannot be read."""
    with reading(repr(str(file))):
        text = file.read_bytes()
    return parse_metrics(text, file)


def parse_metrics(text: bytes, file: Path) -> list[MetricsLine]:
    """Return the lines of `metrics.jsonl`, without a last one that a kill cut short.

    Raises:
        UserError: another line is not what a run writes.
    """
    *whole, last = text.split(b"\n")
    found = [_line(line, f"{str(file)!r}, line {number:,}") for number, line in enumerate(whole, 1) if line.strip()]
    with suppress(UserError):
        found += [_line(last, "")] if last.strip() else []
    return found


def _line(line: bytes, what: str) -> MetricsLine:
    made = cast("dict[str, Any]", parse_json(line, MetricsLine, what, _REMEDY))
    if "step" not in made:
        raise UserError(f"{what} has no step; {_REMEDY}")
    return cast("MetricsLine", made)
