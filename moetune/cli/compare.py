"""`moetune compare`: print the predicted memory of several run files in one table."""

from pathlib import Path
from typing import Annotated

from moetune.cli import options as cli


def compare(
    runs: Annotated[list[Path], cli.argument("RUN.yaml…", "Run files.")],
    gpu: Annotated[
        list[str] | None, cli.option(None, "A card to predict for; repeatable. Default: each run's hardware.gpu.")
    ] = None,
    set_: cli.Overrides = None,
    json_: cli.Json = False,
) -> None:
    """Predict the memory of several runs, on one card or several, in one table. Exit code 1: not all of them fit."""
    with cli.heavy_imports():
        from moetune.planning.compare import compare as compare_runs
        from moetune.planning.views import comparison

    rows = compare_runs([(run.stem, cli.read_run(run, set_)) for run in runs], gpu or ())
    result = {"runs": [row.to_json() for row in rows]}
    cli.answer(json_, result, *comparison(rows), fails=any(row.report.fits is False for row in rows))
