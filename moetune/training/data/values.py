"""Checks of a record's values, named in messages; parsing of values given as JSON text."""

import json
from typing import Any

from moetune.errors import UserError, one_line, shown
from moetune.json_files import UNIQUE_KEYS


class MalformedError(UserError):
    """A single record cannot be used; the message gives the reason."""


def kind(value: object) -> str:
    """Return JSON's name for the type of a value, with an article ("an object", "text"), for messages."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def checked_text(value: object, what: str) -> str:
    """Return `value` if it is text that can be tokenized; `what` names it in messages.

    Raises:
        MalformedError: `value` is not a string, is empty or white space, or holds an unpaired surrogate.
    """
    if not isinstance(value, str):
        raise MalformedError(f"{what} is {kind(value)}, not text")
    if not value.strip():
        raise MalformedError(f"{what} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise MalformedError(f"{what} holds half of a surrogate pair, which is no character") from None
    return value


def checked_list(value: object, what: str) -> list[Any]:
    """Return a list that is given as it is, by keys (`by_rows`) or as JSON text; `what` names it in messages.

    Raises:
        MalformedError: `value` is neither, or an object in the text has a key twice.
    """
    value = by_rows(parsed(value, what) if isinstance(value, str) else value, what)
    if not isinstance(value, list):
        raise MalformedError(f"{what} is {kind(value)}, not a list")
    return value


def by_rows(value: Any, what: str) -> Any:
    """Return a list of objects that is kept by keys, `{"role": […], "content": […]}`, as `datasets` writes it; any
    other value as it is. Raise `MalformedError` if the lists differ in length."""
    if not isinstance(value, dict) or not value or not all(isinstance(column, list) for column in value.values()):
        return value
    if len({*map(len, value.values())}) > 1:
        lengths = ", ".join(f"{len(column)} of {key}" for key, column in value.items())
        raise MalformedError(
            f"{what} is an object of lists that do not go together ({lengths}); write a list of objects"
        )
    return [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]


def checked_object(value: object, what: str) -> dict[str, Any]:
    """Return an object that is given as it is or as JSON text; `what` names it in messages.

    Raises:
        MalformedError: `value` is neither; or it holds a key twice, NaN, a number beyond the range of floats, or a
            value that JSON cannot represent.
    """
    value = parsed(value, what) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise MalformedError(f"{what} is {kind(value)} ({shown(value)}), not an object")
    json_text(value, what)
    return value


def parsed(text: str, what: str) -> Any:
    """Return the value of JSON text, in which no object may have a key twice; raise `MalformedError` otherwise."""
    try:
        return UNIQUE_KEYS.decode(text.strip())
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{what} is text and not valid JSON, {shown(text)}: {one_line(error)}") from None


def json_text(value: object, what: str) -> str:
    """Return a value as JSON text.

    Raises:
        MalformedError: it holds NaN, an infinity (1e400, say), or a value that JSON cannot represent, such as bytes.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedError(f"{what} cannot be written as JSON, {shown(value)}: {one_line(error)}") from None
