"""`moetune predict`: the memory report of a run, before it runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moetune.cli.imports import heavy_imports
from moetune.cli.options import (
    Experts,
    Json,
    Lora,
    Overrides,
    Page,
    Picture,
    Router,
    Tokens,
    Verbose,
    within_memory,
)


def predict(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN.yaml|MODEL", help="A run file; or a model, and what of it trains.", show_default=False
        ),
    ],
    router: Router = None,
    experts: Experts = None,
    lora: Lora = None,
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
    tokens: Tokens = None,
    measured: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="A run folder like it, or its metrics.jsonl: estimate by its tokens/s."),
    ] = None,
    html: Page = None,
    figure: Picture = None,
    set_: Overrides = None,
    verbose: Verbose = False,
    json_: Json = False,
) -> None:
    """Predict the peak memory of a run, without loading a weight, and whether it fits. Exit code 1: no."""
    from moetune.errors import UserError

    if method not in (None, "trace", "formula"):
        raise UserError(f"--method {method!r}: it is trace or formula")
    if allocator not in (None, "default", "expandable"):
        raise UserError(f"--allocator {allocator!r}: it is default or expandable")

    import json
    import sys
    from dataclasses import replace

    from moetune.models.catalog.gpus import find_gpu
    from moetune.planning.from_options import as_yaml, config_of

    config, stands_for = config_of(run, set_ or (), router=router, experts=experts, lora=lora, gpu=gpu)
    config = within_memory(config)
    if gpu is not None:
        find_gpu(gpu)  # before what takes seconds
    from moetune.memory.time.measured import speed_of

    speed = None if measured is None else speed_of(measured)

    with heavy_imports():
        from moetune.memory.predict import predict as predict_run
        from moetune.memory.routing import parse_routing

    if figure is not None:
        from moetune.report.figures import refuse_unknown_format

        refuse_unknown_format(figure)
    chosen: Any = {"method": method, "allocator": allocator}
    report = predict_run(config, gpu=gpu, routing=parse_routing(routing), **chosen)
    if speed is not None:
        if report.time is None:
            raise UserError("--measured wants a card whose speed is known, as in --gpu l40s, and --method trace")
        report = replace(report, time=report.time.as_measured(speed))
    if tokens is not None and method == "formula":
        why = "no hours for --tokens: a closed form says nothing of time; leave --method formula out"
        report = replace(report, notes=(*report.notes, why))
    source = [("run file", run)] if stands_for is None else []
    report = replace(report, about=(*source, *[("--set", setting) for setting in set_ or ()], *report.about))
    if html is not None:
        from moetune.report.page import write_page

        write_page(report, html)
        print(f"{html} written", file=sys.stderr)
    if figure is not None:
        from moetune.report.figures import save_figure

        save_figure(report, figure)
        print(f"{figure} written", file=sys.stderr)
    if json_:
        hours = None if report.time is None or tokens is None else report.time.hours(tokens).to_json()
        print(json.dumps({**report.to_json(), "hours": hours, "run": config.model_dump(mode="json")}, indent=2))
    else:
        if stands_for is not None:
            print(f"# the run file that this stands for\n{as_yaml(stands_for)}")
        from moetune.report.console import terminal
        from moetune.report.terminal import print_report

        print_report(report, terminal(), verbose=verbose, tokens=tokens)
    if report.fits is False:
        raise typer.Exit(1)
