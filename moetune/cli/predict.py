"""`moetune predict`: print the memory that a run will need, without running it."""

from dataclasses import replace
from typing import Annotated, Any

from moetune.cli import options as cli
from moetune.errors import UserError, note


def predict(
    run: Annotated[str, cli.argument("RUN.yaml|MODEL", "A run file; or a model, with options for what to train.")],
    router: Annotated[
        str | None, cli.option("LAYERS", "For a MODEL: train the routers of these layers, such as all or 0-5.")
    ] = None,
    experts: Annotated[
        str | None, cli.option("LAYERS:EXPERTS", "For a MODEL: train these experts of these layers, such as 0-5:0,1.")
    ] = None,
    lora: Annotated[int | None, cli.number("For a MODEL: train LoRA on attention and experts.", metavar="RANK")] = None,
    gpu: cli.Card = None,
    routing: cli.Routed = None,
    allocator: Annotated[
        str | None, cli.choice("default|expandable", "Torch's allocator. Default: PYTORCH_ALLOC_CONF.")
    ] = None,
    tokens: cli.Tokens = None,
    measured: Annotated[
        str | None, cli.option("RUN", "Estimate time by the tokens/s of a similar run: its folder or metrics.jsonl.")
    ] = None,
    trainer: cli.Trainer = None,
    trl: cli.TrlSettings = None,
    html: cli.Page = None,
    figure: cli.Picture = None,
    set_: cli.Overrides = None,
    verbose: Annotated[
        bool, cli.option(None, "Print formulas, single allocations and assumptions.", "--verbose", "-v")
    ] = False,
    json_: cli.Json = False,
) -> None:
    """Predict a run's peak memory without loading weights, and whether it fits. Exit code 1: it does not fit."""
    from moetune.memory.time.measured import speed_of
    from moetune.planning.from_options import as_yaml, config_of

    config, stands_for = config_of(run, set_ or (), router=router, experts=experts, lora=lora, gpu=gpu)
    config, arguments = cli.within_memory(config), cli.trl_settings(trainer, trl)
    if trainer is not None and (measured is not None or tokens is not None):
        raise UserError("--trainer predicts memory; leave --measured and --tokens out")
    speed = None if measured is None else speed_of(measured)
    with cli.heavy_imports():
        from moetune.memory.assumed_routing import parse_routing
        from moetune.planning.at_hand import in_words
        from moetune.planning.predict import predict as predict_run
        from moetune.report.memory import memory_view

    local = cli.at_hand(gpu, config.hardware.names, config.hardware.count)
    card, routed = local or gpu, parse_routing(routing)
    if trainer is None:
        report = predict_run(config, gpu=card, routing=routed, allocator=allocator)  # type: ignore[arg-type]
    else:
        from moetune.memory.commands.trl import predict_trl

        which: Any = trainer
        report = predict_trl(config, which, arguments, gpu=card, routing=routed, allocator=allocator)  # type: ignore[arg-type]
    if speed is not None:
        if report.time is None:
            raise UserError("--measured needs a card whose speed is known, such as --gpu l40s")
        report = replace(report, time=report.time.as_measured(speed))
    source = [("run file", run)] if stands_for is None else []
    source += [] if local is None else [("card", in_words(local))]
    report = replace(report, about=(*source, *[("--set", setting) for setting in set_ or ()], *report.about))
    shown = [] if stands_for is None else [f"# the run file for these options\n{as_yaml(stands_for)}"]
    view = memory_view(report, tokens)
    if html is not None or figure is not None:
        from moetune.report.memory_charts import memory_chart
        from moetune.report.page import write_page

        chart = memory_chart(report)
        if html is not None:
            write_page(view, html, [chart])
            note(f"{html} written")
        if figure is not None:
            chart.save(figure)
            note(f"{figure} written")
    hours = None if report.time is None or tokens is None else report.time.hours(tokens).to_json()
    result = {**report.to_json(), "hours": hours, "run": config.model_dump(mode="json")}
    cli.answer(json_, result, *shown, view, verbose=verbose, fails=report.fits is False)
