"""Options that several commands share."""

from __future__ import annotations

import typing
from typing import Annotated, Literal

import typer

from moetune.config import DataConfig
from moetune.errors import UserError, suggest

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the run file; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Opens = Annotated[
    str,
    typer.Argument(
        metavar="RUN_DIR|MODEL",
        help="A run folder, an adapter or checkpoint that was exported, a catalog name or a hub id.",
        show_default=False,
    ),
]
KeepPacked = Annotated[
    str | None,
    typer.Option("--base", metavar="nf4|int8", help="Keep a model packed; a run is as in training."),
]


def checked_base(base: str | None) -> Literal["nf4", "int8"] | None:
    """Raises `UserError` for a precision that nothing is packed in."""
    if base is None:
        return None
    if base in ("nf4", "int8"):
        return "nf4" if base == "nf4" else "int8"
    raise UserError(f"--base {base!r}: it is nf4 or int8, or left out for the checkpoint as it is")


def checked_format(format: str | None) -> None:
    """Raises `UserError` for a format that no data have."""
    known = typing.get_args(DataConfig.model_fields["format"].annotation)
    if format is not None and format not in known:
        raise UserError(f"--format {format!r}: it may be {', '.join(known)}.{suggest(format, known)}")
