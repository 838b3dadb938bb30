"""`moetune report`: write a run as one HTML page."""

import time
from pathlib import Path
from typing import Annotated

from moetune.cli import options as cli


def report(
    run: cli.RunFolder,
    out: Annotated[
        Path | None, cli.option("FILE", "Output file. Default: report.html in the run folder.", check=cli.output_file)
    ] = None,
    watch: Annotated[int | None, cli.number("Write it every SECONDS, until Ctrl-C.", metavar="SECONDS")] = None,
    timeline: Annotated[bool, cli.option(None, "Also trace a step, to show its memory over time.")] = True,
    json_: cli.Json = False,
) -> None:
    """Write one self-contained page: curves, speed, memory, expert load, what trained, the run file and versions."""
    with cli.heavy_imports():
        from moetune.inference.run_page import run_of, run_page
        from moetune.planning.predict import predict
        from moetune.report.memory_charts import memory_chart
        from moetune.report.page import write_page
        from moetune.run.resolve import resolve
        from moetune.training.folder.run_folder import PAGE_FILE
        from moetune.training.folder.run_writer import RunWriter

    resolved, path = run_of(run), out or run / PAGE_FILE
    if out is None:
        RunWriter(run).own(PAGE_FILE)
    step = [memory_chart(predict(resolve(resolved.config, "cuda")))] if timeline else []
    while True:
        view, charts = run_page(run, resolved)
        write_page(view, path, [*charts, *step], refresh=watch)
        if watch is None:
            break
        time.sleep(watch)
    cli.answer(json_, {"out": str(path)}, str(path))
