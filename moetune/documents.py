"""JSON that is read back, as values of the type that its reader names; or one line that says which key is wrong.

    {"schema": 1, …, "seal": SHA-256 of the rest as JSON}

is a sealed document: one that was changed after it was written is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from moetune.errors import UserError, reading, shown

T = TypeVar("T")
_MOST_BYTES = 2**30
Amount = Annotated[int, Field(ge=0, lt=2**63)]
"""Of bytes, tokens or steps."""
Number = Annotated[float, Field(allow_inf_nan=False)]


def read_json(file: Path, kind: Callable[..., T], what: str = "", remedy: str = "") -> T:
    """Reads a JSON file as a value of a type: a dataclass, a TypedDict, `dict[str, Any]`. Other keys are left out.

    Args:
        what: names the file in messages; by default its path does.
        remedy: what to do about a bad one.

    Raises:
        UserError: the file cannot be read, is not JSON, holds a key twice, or holds something else than `kind`.
    """
    what = what or repr(str(file))
    return parse_json(_bytes_of(file, what, remedy), kind, what, remedy)


def parse_json(text: bytes, kind: Callable[..., T], what: str, remedy: str = "") -> T:
    """The same of what a file holds. Types are those of JSON: neither `"1"` nor `true` is a number."""
    with reading(what, remedy):
        try:
            found: T = _adapter(kind).validate_json(text, strict=True)
        except ValidationError as error:
            raise ValueError(first_problem(error)) from error
        json.loads(text, object_pairs_hook=_refuse_twice)
        return found


def sealed(body: Mapping[str, Any]) -> str:
    """The text of a sealed document."""
    said = {"schema": 1, **body}
    return json.dumps({**said, "seal": hashlib.sha256(json.dumps(said).encode()).hexdigest()}, indent=2) + "\n"


def read_sealed(file: Path, kind: Callable[..., T], what: str = "", remedy: str = "") -> T:
    """As `read_json`, of a sealed document.

    Raises:
        UserError: as `read_json`, or it was changed after it was written.
    """
    what = what or repr(str(file))
    text = _bytes_of(file, what, remedy)
    body = parse_json(text, dict[str, Any], what, remedy)
    body.pop("seal", None)
    if body.pop("schema", None) != 1 or sealed(body).encode() != text:
        raise UserError(f"{what} was changed after it was written{remedy and '; '}{remedy}")
    return parse_json(text, kind, what, remedy)


def first_problem(error: ValidationError) -> str:
    """The first of what is wrong with a value, in one line: where, what is there, and what may be."""
    item = error.errors(include_url=False)[0]
    where = ".".join(str(part)[:80] for part in item["loc"])
    said = item["msg"].removeprefix("Value error, ")[:300]
    if item["type"] in ("json_invalid", "missing", "value_error"):
        return f"{where}: {said}" if where else said
    return f"{where}{where and ': '}{shown(item['input'])}: {said}"


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _bytes_of(file: Path, what: str, remedy: str) -> bytes:
    with reading(what, remedy), file.open("rb") as opened:
        text = opened.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
    return text


def _refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {shown(next(key for key in keys if keys.count(key) > 1))} is written twice")
