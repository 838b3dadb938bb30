"""`moetune compare`: several run files, one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.imports import heavy_imports
from moetune.cli.options import Json, Overrides, read_run


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN.yaml…", help="Run files.", show_default=False)],
    gpu: Annotated[
        list[str] | None, typer.Option(help="A card to put each on; repeatable. Default: hardware.gpu of each.")
    ] = None,
    method: Annotated[str, typer.Option(metavar="formula|trace", help="How memory is predicted.")] = "formula",
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Predict several runs, on one card or several, in one table. Exit code 1: not all of them fit."""
    from moetune.errors import UserError

    if method not in ("trace", "formula"):
        raise UserError(f"--method {method!r}: it is trace or formula")

    import json

    with heavy_imports():
        from moetune.planning.compare import compare as compare_runs

    rows = compare_runs([(run.stem, read_run(run, set_)) for run in runs], gpu or (), method)
    if json_:
        print(json.dumps({"schema": 1, "runs": [row.to_json() for row in rows]}, indent=2))
    else:
        from moetune.planning.tables import comparison
        from moetune.report.console import terminal

        for table in comparison(rows):
            terminal().print(table, highlight=False)
    if any(row.report.fits is False for row in rows):
        raise typer.Exit(1)
