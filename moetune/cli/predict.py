"""`moetune predict`: the memory report of a run, before it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moetune.cli.imports import heavy_imports
from moetune.cli.options import Json, Overrides, read_run


def predict(
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.", show_default=False)],
    gpu: Annotated[
        str | None, typer.Option(help="A GPU such as l40s, or a size such as 44GiB. Default: hardware.gpu.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(metavar="trace|formula", help="Default: trace."),
    ] = None,
    routing: Annotated[
        str, typer.Option(metavar="balanced|skew:S|worst|FILE", help="How many tokens each expert receives.")
    ] = "balanced",
    allocator: Annotated[
        str | None,
        typer.Option(metavar="default|expandable", help="Torch's. Default: as PYTORCH_ALLOC_CONF says."),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write one self-contained page.")] = None,
    figure: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a picture, .png or .svg.")] = None,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Predict the peak memory of a run, without loading a weight, and whether it fits. Exit code 1: no."""
    from moetune.errors import UserError

    if method not in (None, "trace", "formula"):
        raise UserError(f"--method {method!r}: it is trace or formula")
    if allocator not in (None, "default", "expandable"):
        raise UserError(f"--allocator {allocator!r}: it is default or expandable")

    import json

    from moetune.catalog.gpus import find_gpu

    config = read_run(run, set_)
    if gpu is not None:
        find_gpu(gpu)  # before what takes seconds

    with heavy_imports():
        from moetune.memory.predict import predict as predict_run
        from moetune.memory.routing import parse_routing
        from moetune.run.resolve import resolve

    if figure is not None:
        from moetune.report.figures import refuse_unknown_format

        refuse_unknown_format(figure)
    chosen: Any = {"method": method, "allocator": allocator}
    report = predict_run(resolve(config), gpu=gpu, routing=parse_routing(routing), **chosen)
    if html is not None:
        from moetune.report.page import write_page

        write_page(report, html)
    if figure is not None:
        from moetune.report.figures import save_figure

        save_figure(report, figure)
    if json_:
        print(json.dumps(report.to_json(), indent=2))
    else:
        from rich.console import Console

        from moetune.report.terminal import print_report

        print_report(report, Console(markup=False))
    if report.fits is False:
        raise typer.Exit(1)
