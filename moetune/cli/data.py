"""`moetune data`: what a run's data become."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.imports import heavy_imports
from moetune.cli.options import Json, Overrides, output_file
from moetune.config.fields import LARGEST


def data(
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.", show_default=False)],
    records: Annotated[
        int, typer.Option("--records", min=0, max=LARGEST, metavar="N", help="How many records to show.")
    ] = 3,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a self-contained page.", callback=output_file)
    ] = None,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Show what a run's data become: the first records as tokens, which of them carry loss, lengths, steps an epoch."""
    import json

    from moetune.config.load import load_run_config, refuse_missing_files

    config = load_run_config(run, set_ or ())
    refuse_missing_files(config, run)
    with heavy_imports():
        from moetune.training.data.preview import preview

    found = preview(config, records)
    if html is not None:
        from moetune.report.data import write_data_page

        write_data_page(found.name, found.to_json(), html)
    if json_:
        print(json.dumps(found.to_json()))
        return
    from moetune.report.console import terminal
    from moetune.report.data import print_data

    print_data(found.name, found.to_json(), terminal())
