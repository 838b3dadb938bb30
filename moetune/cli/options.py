"""Options that several commands share, and how they read a run file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.imports import heavy_imports
from moetune.config import RunConfig
from moetune.run_file import load_run_config

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the run file; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def read_run(path: Path | str, overrides: Sequence[str] | None) -> RunConfig:
    """The run file, with a number of experts in the place of a budget of memory. Raises `UserError`."""
    config = load_run_config(path, overrides or ())
    if not config.adapt.has_memory_budget:
        return config
    with heavy_imports():
        from moetune.scoring.budget import within_budget

    def tried(k: int, fits: bool) -> None:
        print(f"{k} experts of each layer {'fit' if fits else 'do not fit'}", file=sys.stderr)

    return within_budget(config, tried)
