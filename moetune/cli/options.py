"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the run file; repeatable."),
]
Router = Annotated[
    str | None, typer.Option(metavar="LAYERS", help="Of a MODEL: routers of these layers train, such as all or 0-5.")
]
Experts = Annotated[
    str | None,
    typer.Option(metavar="LAYERS:EXPERTS", help="Of a MODEL: these experts of these layers train, such as 0-5:0,1."),
]
Lora = Annotated[
    int | None, typer.Option(metavar="RANK", min=1, help="Of a MODEL: LoRA on attention and experts trains.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print formulas, single allocations and assumptions.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
