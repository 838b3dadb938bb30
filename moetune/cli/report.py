"""The command `moetune report`: write a run as one HTML page."""

import time
from pathlib import Path
from typing import Annotated

from moetune.cli.options import Json, RunFolder, answer, heavy_imports, number, option, output_file


def report(
    run: RunFolder,
    out: Annotated[
        Path | None, option("FILE", "Output file. Default: report.html in the run folder.", check=output_file)
    ] = None,
    watch: Annotated[int | None, number("Write it every SECONDS, until Ctrl-C.", metavar="SECONDS")] = None,
    timeline: Annotated[bool, option(None, "Also trace a step, to show its memory over time.")] = True,
    json_: Json = False,
) -> None:
    """Write one self-contained page: curves, speed, memory, expert load, what trained, the run file and versions."""
    with heavy_imports():
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
    answer(json_, {"out": str(path)}, str(path))
