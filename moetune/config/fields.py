"""Types of values in a run file: numbers, memory sizes, paths, lists of layers or experts."""

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from moetune.config.memory_size import HOW_TO_WRITE_A_SIZE, parse_size
from moetune.errors import shown
from moetune.files import check_path

LARGEST = 2**31
"""Largest integer accepted in a run file or on a command line."""
_LARGEST_ID = 2**16
_RANGE = re.compile(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", re.ASCII)
IdSet = Literal["all", "none"] | tuple[int, ...]
"""Layer indices or expert ids: all of them, none, or a sorted tuple."""
IdsByLayer = dict[int, tuple[int, ...]]
"""Layer index -> expert ids."""


def parse_ids(value: object) -> object:
    """Parse `"0-5,8"`, `3` or `[0, 1, "4-6"]` into a sorted tuple of integers; return `all` and `none` unchanged.

    Raises:
        ValueError: the value is not such a list, the list is empty, an id is above 65,536, or a range runs backwards.
    """
    if value in ("all", "none"):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, str, list, tuple)):
        raise ValueError(f'{shown(value)} is not a list of numbers; write all, none, 3, [0, 1] or "0-5,8"')
    words = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else value
    ids: set[int] = set()
    for word in words:
        text = word if isinstance(word, str) else shown(word)
        match = _RANGE.fullmatch(text)
        if match is None:
            raise ValueError(f'{shown(text.strip())} is not a number or a range; write all, none, 3, [0, 1] or "0-5,8"')
        first, last = int(match[1]), int(match[2] or match[1])
        if last > _LARGEST_ID:
            raise ValueError(f"{last} is above the largest id, 65536")
        if last < first:
            raise ValueError(f'range {text!r} runs backwards; write "{last}-{first}"')
        ids.update(range(first, last + 1))
    if not ids:
        raise ValueError("the list is empty; write none to choose nothing")
    return tuple(sorted(ids))


def _parse_expert_ids(value: object) -> object:
    """Parse expert ids: one list for all layers (`parse_ids`), or a dict of layer index -> list, sorted by layer.

    Raises:
        ValueError: the value has another form; or the dict is empty, or has a layer twice.
    """
    if not isinstance(value, dict):
        return parse_ids(value)
    by_layer: IdsByLayer = {}
    for layer, ids in value.items():
        if not str(layer).isdecimal():
            raise ValueError(f"{layer!r} is not the number of a layer; write {{0: [1, 2], 3: [0]}}")
        parsed = parse_ids(ids)
        if not isinstance(parsed, tuple):
            raise ValueError(f"layer {layer}: {ids!r} does not list experts; write {{{layer}: [0, 1]}}")
        if int(layer) in by_layer:
            raise ValueError(f"layer {int(layer)} is written twice")
        by_layer[int(layer)] = parsed
    if not by_layer:
        raise ValueError("no layer is listed; write none to choose nothing")
    return dict(sorted(by_layer.items()))


def parse_stages(value: object) -> object:
    """Parse pipeline stages such as `["0-13", "14-31"]`, `[0, "1-3"]` or `[[0, 13], [14, 31]]` into pairs of first and
    last layer; return `auto` as it is.

    Raises:
        ValueError: a stage is no number or range.
    """
    if value == "auto":
        return value
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{shown(value)} is not a list of stages; write auto, or ranges of layers: [0-13, 14-31]")
    pairs = list[tuple[int, int]]()
    for stage in value:
        is_pair = isinstance(stage, (list, tuple)) and len(stage) == 2
        ids = parse_ids("-".join(map(str, stage)) if is_pair else stage)
        if not isinstance(ids, tuple) or ids != tuple(range(ids[0], ids[-1] + 1)):
            raise ValueError(f"{shown(stage)} is not a stage: one range of layers, such as 0-13")
        pairs.append((ids[0], ids[-1]))
    return tuple(pairs)


def layer_range(text: str) -> tuple[int, ...] | None:
    """Parse a text such as `0-5,8` into a sorted tuple of integers; return None for any other, `all` and `none` too."""
    try:
        ids = parse_ids(text)
    except ValueError:
        return None
    return ids if isinstance(ids, tuple) else None


def ranges(values: Iterable[int]) -> str:
    """Format integers as in a run file: `[0, 1, 2, 5]` becomes "0-2,5"."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _size_or(what: str, *words: str, share: float | None = None) -> BeforeValidator:
    """Return a validator of values that are a positive memory size, one of `words`, or a float from 0 to `share`, both
    excluded.

    Without `share`, no float is valid. An integer becomes text, other values stay as they are. `what` names the valid
    forms, for the message "… is neither `what`".
    """

    def check(value: Any) -> Any:
        value = str(value) if type(value) is int else value
        is_size = isinstance(value, str) and (value in words or (parse_size(value) or 0) > 0)
        if not is_size and not (share is not None and isinstance(value, float) and 0 < value < share):
            raise ValueError(f"{shown(value)} is {'neither' if ' nor ' in what else 'not'} {what}")
        return value

    return BeforeValidator(check)


def _check_coefficient(value: object) -> object:
    with suppress(ValueError):
        value = float(value) if isinstance(value, str) else value  # YAML takes 1e-3 for text
    if value == "auto" or (type(value) in (int, float) and 0 <= value <= 1e6):  # type: ignore[operator]
        return value
    raise ValueError(f"{value!r} is neither a number from 0 to 1e6 nor auto")


def _check_keep_rows(value: object) -> object:
    if value in ("none", 0) and value is not False:
        return "none"
    if value == "auto":
        return value
    if type(value) is int and 0 < value <= LARGEST:
        return value
    raise ValueError(f"{shown(value)} is neither a number of layers nor none nor auto")


def _check_text(text: str) -> str:
    """Return text unchanged; raise `ValueError` if it has a character that cannot be printed."""
    if not text.isprintable():
        raise ValueError("it holds a character that cannot be printed")
    return text


def _check_path(text: str) -> str:
    """Return a path unchanged; raise `ValueError` if no file can have this name."""
    check_path(text)
    if re.search(r"\$\{|(^|/)\$\w+(/|$)", text):
        raise ValueError(f"{shown(text)} names a variable, and run files have none; write its value")
    return _check_text(text)


Ids = Annotated[IdSet, BeforeValidator(parse_ids)]
AutoIds = Annotated[IdSet | Literal["auto"], BeforeValidator(lambda v: v if v == "auto" else parse_ids(v))]
ExpertIds = Annotated[IdSet | IdsByLayer, BeforeValidator(_parse_expert_ids)]
Text = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_check_text)]
Gpu = Annotated[Text, BeforeValidator(lambda value: str(value) if type(value) is int else value)]  # 48: no unit
FilePath = Annotated[str, Field(min_length=1), AfterValidator(_check_path)]
Positive = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=LARGEST)]
Size = Annotated[int, Field(gt=0, le=2**16)]
"""Size of one axis of a tensor or of a device mesh, at most 2¹⁶: products of several sizes still fit into 64 bits."""
Strength = Annotated[float, Field(ge=0, le=1e18)]
"""Coefficient or bound of losses, gradients or weights, at most 10¹⁸: its square fits into float32."""
Decay = Annotated[float, Field(ge=0, lt=1)]
Coefficient = Annotated[float | str, BeforeValidator(_check_coefficient)]
LossMemory = Annotated[str, _size_or(f"a size above zero nor none nor auto. {HOW_TO_WRITE_A_SIZE}", "none", "auto")]
ExpertMemory = Annotated[str, _size_or(f"a size nor 0 nor auto. {HOW_TO_WRITE_A_SIZE}", "0", "auto")]
HostSize = Annotated[str, _size_or(f"a size above zero. {HOW_TO_WRITE_A_SIZE}")]
KeepRows = Annotated[int | Literal["none", "auto"], BeforeValidator(_check_keep_rows)]
Budget = Annotated[
    str | float, _size_or("memory, such as 44GiB, nor a share of each layer's experts, such as 0.25", share=1)
]
