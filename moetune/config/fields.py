"""What may stand at a key of the run file: numbers, sizes, lists of layers and experts. config.py has the keys."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from moetune.config.sizes import HOW_TO_WRITE_A_SIZE, parse_size
from moetune.errors import shown
from moetune.files import check_path

_LARGEST_ID = 2**16
IdSet = Literal["all", "none"] | tuple[int, ...]
"""Layer or expert numbers: every one, no one, or those listed."""
IdsByLayer = dict[int, tuple[int, ...]]
"""Expert numbers of each layer that is named."""


def parse_ids(value: object) -> object:
    """Turns `"0-5,8"`, `3` or `[0, 1, "4-6"]` into a sorted tuple of ints; `all` and `none` stay as they are.

    Raises:
        ValueError: the text is no such list, or a range runs backwards.
    """
    if value in ("all", "none"):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, str, list, tuple)):
        raise ValueError(f'{shown(value)} is not a list of numbers; write all, none, 3, [0, 1] or "0-5,8"')
    words = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else value
    ids: set[int] = set()
    for word in words:
        text = word if isinstance(word, str) else shown(word)
        match = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", text, re.ASCII)
        if match is None:
            raise ValueError(f'{shown(text.strip())} is not a number or a range; write all, none, 3, [0, 1] or "0-5,8"')
        first, last = int(match[1]), int(match[2] or match[1])
        if last > _LARGEST_ID:
            raise ValueError(f"{last} is no layer and no expert of any model")
        if last < first:
            raise ValueError(f'range {text!r} runs backwards; write "{last}-{first}"')
        ids.update(range(first, last + 1))
    if not ids:
        raise ValueError("the list is empty; write none to choose nothing")
    return tuple(sorted(ids))


def parse_expert_ids(value: object) -> object:
    """As `parse_ids`, or a mapping of layers to such lists, in the order of layers.

    Raises:
        ValueError: a layer is no number, a list is none, or nothing is listed.
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


def check_expert_memory(value: object) -> object:
    """Passes a size, 0 or `auto`, as it is written.

    Raises:
        ValueError: it is none of these.
    """
    if value == 0 and not isinstance(value, bool):
        return "0"
    if value in ("0", "auto") or (isinstance(value, str) and (parse_size(value) or -1) > 0):
        return value
    raise ValueError(f"{value!r} is neither a size nor 0 nor auto. {HOW_TO_WRITE_A_SIZE}")


def check_memory(value: object) -> object:
    """Passes a size above zero, or `none`, as it is written.

    Raises:
        ValueError: it is neither.
    """
    if value == "none" or (isinstance(value, str) and (parse_size(value) or 0) > 0):
        return value
    raise ValueError(f"{shown(value)} is neither a size above zero nor none. {HOW_TO_WRITE_A_SIZE}")


def check_text(text: str) -> str:
    """Raises `ValueError` for what cannot be written to a file in UTF-8, or printed."""
    if not text.isprintable():
        raise ValueError("it holds a character that cannot be printed")
    return text


def check_written_path(text: str) -> str:
    """Raises `ValueError` where no file can be called that. The path stays as it is written."""
    check_path(text)
    return check_text(text)


def check_budget(value: object) -> object:
    """Passes memory, or a share of each layer's experts.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, str):
        return check_memory(value) if value != "none" else _refuse_budget(value)
    return value if isinstance(value, (int, float)) and 0 < value < 1 else _refuse_budget(value)


def _refuse_budget(value: object) -> object:
    raise ValueError(f"{value!r} is neither memory, such as 44GiB, nor a share of each layer's experts, such as 0.25")


def check_coefficient(value: object) -> object:
    """Passes a number from 0 to 1e6, or `auto`.

    Raises:
        ValueError: it is neither.
    """
    if value == "auto" or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1e6):
        return value
    raise ValueError(f"{value!r} is neither a number from 0 to 1e6 nor auto")


Ids = Annotated[IdSet, BeforeValidator(parse_ids)]
Text = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(check_text)]
FilePath = Annotated[str, Field(min_length=1), AfterValidator(check_written_path)]
Positive = Annotated[int, Field(gt=0, le=2**31)]
Count = Annotated[int, Field(ge=0, le=2**31)]
Size = Annotated[int, Field(gt=0, le=2**16)]
"""Of one axis of a tensor, or of a mesh: products of them still fit into 64 bits."""
Strength = Annotated[float, Field(ge=0, le=1e18)]
"""What a loss, a gradient or a weight is multiplied by, or bounded with: float32 holds its square."""
ExpertIds = Annotated[IdSet | IdsByLayer, BeforeValidator(parse_expert_ids)]
Decay = Annotated[float, Field(ge=0, lt=1)]
