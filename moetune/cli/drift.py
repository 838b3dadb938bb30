"""`moetune drift`: what training did to routing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.imports import heavy_imports
from moetune.cli.options import Json, TrainedRun, output_file
from moetune.config.fields import LARGEST


def drift(
    run: TrainedRun,
    data: Annotated[
        str | None, typer.Option(metavar="FILE", help="What to route. Default: the run's held-out data.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=LARGEST, help="Of it.")] = 131_072,
    figure: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write heatmaps of layer × expert, .png or .svg.", callback=output_file),
    ] = None,
    json_: Json = False,
) -> None:
    """Route held-out data before and after a run: loads, tokens whose experts changed, experts that died."""
    import json

    with heavy_imports():
        from moetune.routing.drift import drift as drift_of
        from moetune.routing.drift import save_heatmaps, write_drift

    if figure is not None:
        from moetune.report.figures import refuse_unknown_format

        refuse_unknown_format(figure)
    found = drift_of(run, data, tokens)
    write_drift(found, run)
    if figure is not None:
        save_heatmaps(found, figure)
    if json_:
        print(json.dumps(found.to_json()))
        return

    from rich.table import Table

    from moetune.report.console import terminal

    table = Table(title=f"{run}, step {found.step}, {found.tokens:,} tokens of {found.data}", title_justify="left")
    for column in ("layer", "Jensen-Shannon distance", "tokens with other experts", "died", "came"):
        table.add_column(column, justify="right")
    for index, layer in found.layers.items():
        died, came = (", ".join(map(str, ids)) for ids in (layer.died, layer.came))
        table.add_row(str(index), f"{layer.distance:.3f}", f"{100 * layer.changed:.1f} %", died, came)
    console = terminal()
    console.print(table)
    console.print(f"{100 * found.changed:.1f} % of the tokens have other experts in some layer", highlight=False)
