"""`moetune verify`: real steps on this machine, measured beside what was predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.imports import heavy_imports
from moetune.cli.options import Json, Overrides, output_file, read_run


def verify(
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.", show_default=False)],
    steps: Annotated[int, typer.Option(min=2, max=10_000, help="Optimizer steps; states appear in the first.")] = 3,
    routing: Annotated[
        str,
        typer.Option(
            metavar="measured|balanced|skew:S|worst|FILE", help="What the prediction assumes of the experts' tokens."
        ),
    ] = "measured",
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also profile a step: its time by part, and a trace for chrome://tracing.",
            callback=output_file,
        ),
    ] = None,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Take real steps with random weights and print predicted beside measured. Exit code 1: more than 5 % apart."""

    config = read_run(run, set_)

    import json
    import sys

    with heavy_imports():
        from moetune.memory.profile import profile_step
        from moetune.memory.routing import parse_routing
        from moetune.memory.verify import verify as verify_run
        from moetune.run.dtypes import this_device
        from moetune.run.resolve import resolve

    resolved = resolve(config, this_device())
    outcome = verify_run(resolved, steps, None if routing == "measured" else parse_routing(routing))
    profiled = None
    if profile is not None:
        profiled = profile_step(resolved, resolved.device(None), profile)
        print(f"{profile} written", file=sys.stderr)
    if json_:
        print(json.dumps(outcome.to_json() | ({} if profiled is None else {"profile": profiled.to_json()}), indent=2))
    else:
        from rich.table import Table

        from moetune.report.console import terminal
        from moetune.report.units import gib

        table = Table(title=f"{config.model.path} on {outcome.device}", title_justify="left")
        for column in ("", "predicted", "measured", "off by"):
            table.add_column(column, justify="left" if not column else "right")
        for name in ("peak_allocated", "peak_reserved"):
            before, after = outcome.predicted[name], outcome.measured[name]
            if before is not None and after is not None:
                table.add_row(name.replace("_", " "), gib(before), gib(after), f"{100 * (before / after - 1):+.2f} %")
        console = terminal()
        console.print(table)
        console.print(f"{outcome.tokens_per_second:,.0f} tokens/s; routing: {outcome.routing}", highlight=False)
        if profiled is not None:
            from moetune.report.profile import profile_table

            for renderable in profile_table(profiled):
                console.print(renderable, highlight=False)
    if not outcome.holds:
        raise typer.Exit(1)
