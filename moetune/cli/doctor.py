"""`moetune doctor`: whether this machine can train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.imports import heavy_imports
from moetune.cli.options import Json, Overrides


def doctor(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN.yaml]", help="Also check what this run needs.", show_default=False)
    ] = None,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Check this machine, or a run on it, and say the remedy of what is wrong. Exit code 1: a run would fail."""
    import json

    from moetune.errors import UserError

    if run is None and set_:
        raise UserError("--set changes a run file; give one")
    with heavy_imports():
        from moetune.config.load import load_run_config
        from moetune.planning.doctor import examine_machine, examine_run

    checks = [*examine_machine(), *(() if run is None else examine_run(load_run_config(run, set_ or ())))]
    is_well = all(check.outcome != "problem" for check in checks)
    if json_:
        said = [check.to_json() for check in checks]
        print(json.dumps({"schema": 1, "is_well": is_well, "checks": said}, indent=2))
    else:
        from rich.text import Text

        from moetune.report.console import terminal

        console = terminal()
        colours = {"ok": "green", "note": "yellow", "problem": "bold red"}
        for check in checks:
            line = f"{check.outcome:8}{check.name}: {check.found}"
            console.print(Text(line, style=colours[check.outcome]), highlight=False)
            if check.remedy:
                console.print(Text(f"        {check.remedy}"), highlight=False)
        console.print("a run can start" if is_well else "a run would fail", style="bold", highlight=False)
    if not is_well:
        raise typer.Exit(1)
