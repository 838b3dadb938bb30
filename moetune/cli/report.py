"""`moetune report`: a run as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.imports import heavy_imports
from moetune.cli.options import Json, TrainedRun, output_file
from moetune.config.fields import LARGEST


def report(
    run: TrainedRun,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to; by default report.html in the run.", callback=output_file),
    ] = None,
    watch: Annotated[
        int | None, typer.Option(min=1, max=LARGEST, metavar="SECONDS", help="Write it again and again, until Ctrl-C.")
    ] = None,
    timeline: Annotated[bool, typer.Option(help="Also trace a step, for its memory over time.")] = True,
    json_: Json = False,
) -> None:
    """Write one self-contained page: curves, speed, memory, expert load, what trained, the run file and versions."""
    import json
    import time

    with heavy_imports():
        from moetune.inference.summary import facts_of, run_of
        from moetune.memory.predict import predict
        from moetune.report.run import write_run_page
        from moetune.run.resolve import resolve
        from moetune.training.run_folder import PAGE_FILE
        from moetune.training.run_writer import RunWriter

    resolved, path = run_of(run), out or run / PAGE_FILE
    if out is None:
        RunWriter(run).own(PAGE_FILE)
    step = predict(resolve(resolved.config, "cuda"), method="trace") if timeline else None
    while True:
        write_run_page(facts_of(run, resolved), path, step, watch)
        if watch is None:
            break
        time.sleep(watch)
    print(json.dumps({"out": str(path)}) if json_ else path)
