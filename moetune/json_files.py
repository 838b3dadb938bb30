"""JSON files validated as types, with errors that name the wrong key; sealed files.

A sealed document has the form `{"schema": 1, …, "seal": "<SHA-256>"}`, where the seal is the SHA-256 of the JSON of all
other keys. Reading a sealed document that was edited after it was written raises `UserError`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from moetune.errors import UserError, reading, shown
from moetune.files import refuse_pointer

T = TypeVar("T")
Amount = Annotated[int, Field(ge=0, lt=2**63)]
"""A number of bytes, tokens or steps: 0 ≤ n < 2⁶³."""
Number = Annotated[float, Field(allow_inf_nan=False)]
"""A float other than NaN and the infinities."""


@dataclass(frozen=True)
class Answer:
    """Base of the dataclasses that commands print as JSON."""

    def to_json(self) -> dict[str, Any]:
        """Return the attributes as an object, after `schema`, the version of this format."""
        return {"schema": 1, **asdict(self)}


class DuplicateKeyError(ValueError):
    """A JSON object contains a key twice; Python's parser would silently keep only the last value."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    by_key = dict(pairs)
    if len(by_key) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in by_key if keys.count(key) > 1)
        raise DuplicateKeyError(f"the key {shown(twice)} appears more than once in one object; keep one of them")
    return by_key


UNIQUE_KEYS = json.JSONDecoder(object_pairs_hook=_without_duplicates)
"""Decodes JSON; raises `DuplicateKeyError` for an object that contains a key twice."""


def read_json(file: Path, kind: Callable[..., T], what: str = "", remedy: str = "") -> T:
    """Read a JSON file and validate it as `kind`.

    Keys that `kind` does not declare are ignored, unless `kind` itself forbids or keeps them.

    Args:
        kind: any type that pydantic can validate, such as a dataclass, a TypedDict or `dict[str, Any]`.
        what: how messages name the file; by default its path in quotes.
        remedy: advice appended to the messages, such as "export the delta again".

    Raises:
        UserError: the file cannot be read, is not JSON, holds a key twice, or does not validate.
    """
    what = what or repr(str(file))
    with reading(what, remedy):
        refuse_pointer(file)
        text = file.read_bytes()
    return parse_json(text, kind, what, remedy)


def parse_json(text: bytes, kind: Callable[..., T], what: str, remedy: str = "") -> T:
    """Validate JSON text (UTF-8) as `kind`, with strict types: neither `"1"` nor `true` passes as a number.

    `what` names the text in messages, which end with `remedy`. Raises `UserError` if the text is not JSON, holds a key
    twice, or does not validate.
    """
    with reading(what, remedy):
        try:
            parsed: T = adapter_of(kind).validate_json(text, strict=True)
        except ValidationError as error:
            raise ValueError(first_problem(error)) from error
        UNIQUE_KEYS.decode(text.decode())
        return parsed


def sealed(body: Mapping[str, Any]) -> str:
    """Return `body` as a sealed document: indented JSON with `schema: 1` first and the seal last."""
    document = {"schema": 1, **body}
    return json.dumps({**document, "seal": hashlib.sha256(json.dumps(document).encode()).hexdigest()}, indent=2) + "\n"


def read_sealed(file: Path, kind: Callable[..., T], what: str = "", remedy: str = "") -> T:
    """Read a sealed document and validate it as `kind`; `what` names the file in messages, which end with `remedy`.

    Raises:
        UserError: the file cannot be read or does not validate; or its text is not, byte for byte, what `sealed`
            returns for its contents.
    """
    what = what or repr(str(file))
    with reading(what, remedy):
        text = file.read_bytes()
    body = parse_json(text, dict[str, Any], what, remedy)
    body.pop("seal", None)
    if body.pop("schema", None) != 1 or sealed(body).encode() != text:
        raise UserError(f"{what} was changed after it was written{remedy and '; '}{remedy}")
    return parse_json(text, kind, what, remedy)


def first_problem(error: ValidationError) -> str:
    """Return the first problem of a pydantic `ValidationError` in one line: the key, its value, and what is valid."""
    item = error.errors(include_url=False)[0]
    where = ".".join(str(part)[:80] for part in item["loc"])
    message = item["msg"].removeprefix("Value error, ")[:300]
    if item["type"] in ("json_invalid", "missing", "value_error"):
        return f"{where}: {message}" if where else message
    return f"{where}{where and ': '}{shown(item['input'])}: {message}"


@cache
def adapter_of(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's adapter of a type."""
    return TypeAdapter(kind)
