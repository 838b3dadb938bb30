"""`Section`, the base of every section: immutable, without unknown keys."""

import re
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Discriminator, ValidationInfo, field_validator

_NUMBERS = re.compile(r"(?!.*(?:bool|Literal|\bstr \||\| str\b)).*\b(?:int|float)\b")
"""Pattern of the types of fields that hold numbers and no words: those have checks of their own."""


def _refuse_booleans(value: Any) -> None:
    if isinstance(value, bool):
        raise ValueError(f"{value} is no number; yes, no, on and off are true and false in YAML")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        _refuse_booleans(inner)


class Section(BaseModel):
    """A section of the run file: an immutable pydantic model that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, serialize_by_alias=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_boolean(cls, value: Any, info: ValidationInfo) -> Any:
        """Return a value unchanged; raise `ValueError` for true and false where numbers belong, which are 1 and 0."""
        if _NUMBERS.match(str(cls.model_fields[str(info.field_name)].annotation)):
            _refuse_booleans(value)
        return value

    def but(self, **changes: Any) -> Self:
        """Return a copy with some values changed; nothing is validated.

        For a key that holds a section, a dict of some of the section's keys changes only these. Any other dict, such as
        ids by layer, replaces the section.
        """
        sections = {key: part for key in changes if isinstance(part := getattr(self, key), Section)}
        nested = {
            key: part.but(**new)
            for key, part in sections.items()
            if isinstance(new := changes[key], dict) and new.keys() <= type(part).model_fields.keys()
        }
        return self.model_copy(update=changes | nested)


def _word_or_section(raw: Any) -> str:
    return "by layer" if isinstance(raw, dict | Section) else "word"


WORD_OR_SECTION = Discriminator(_word_or_section)
"""Tells a union's alternatives apart: the one tagged `by layer`, a section or a mapping, and the one tagged `word`."""
