"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the run file; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
