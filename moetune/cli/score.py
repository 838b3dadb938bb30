"""`moetune score`: which experts a data set uses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moetune.cli.imports import heavy_imports
from moetune.cli.options import Json, Overrides, in_a_folder
from moetune.config.fields import LARGEST

if TYPE_CHECKING:
    from rich.table import Table

    from moetune.config.schema import RunConfig
    from moetune.run.scores import Scores


def score(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|RUN.yaml", help="A model, or a run file that it is to be trained by.")
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="What to read, as under data.train; repeatable. Default: the run file's."),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Where the scores are written.", callback=in_a_folder)
    ] = Path("scores.json"),
    tokens: Annotated[int, typer.Option(min=1, max=LARGEST, help="Of each FILE.")] = 131_072,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output.")] = False,
    predict: Annotated[
        bool, typer.Option("--predict", help="Score nothing: predict the peak memory, and whether it fits.")
    ] = False,
    gpu: Annotated[
        str | None, typer.Option(help="With --predict: a GPU such as l40s, or a size. Default: hardware.gpu.")
    ] = None,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Count what each expert of a base receives from data: tokens, gate weight, REAP's score, pairs, by layer."""
    import json
    import sys

    from moetune.cli.ranks import exit_as_ranks
    from moetune.config.load import load_run_config, read_run_config, refuse_missing
    from moetune.errors import UserError
    from moetune.parallel.launch import is_quiet, was_launched

    if model.endswith((".yaml", ".yml")):
        config = load_run_config(model, set_ or ())
    elif set_:
        raise UserError("--set changes a run file; give one in the place of MODEL")
    else:
        config = read_run_config({"model": {"path": model}, "adapt": {"router": "all"}}, (), "score")
    if gpu is not None and not predict:
        raise UserError("--gpu is the card that --predict predicts for; scoring itself takes this machine's")
    refuse_missing(data or ())
    if predict:
        _predict(config, data, gpu, json_)
        return
    if not data and config.data is None:
        raise UserError("moetune score needs --data FILE, or data: in the run file")
    interrupted = "interrupted; the same command goes on from here"
    if config.parallel.ranks > 1 and not was_launched():
        exit_as_ranks(config.parallel.ranks, interrupted)

    with heavy_imports():
        from moetune.parallel.join import joined
        from moetune.routing.score import names_of, to_score
        from moetune.routing.score import score as score_run
        from moetune.run.dtypes import this_device
        from moetune.run.resolve import resolve

    names, device = data or names_of(config), this_device()
    try:
        with joined(config.parallel, device) as ranks:
            run = resolve(to_score(config), device)
            scores = score_run(run, names, tokens, out, overwrite=overwrite, ranks=ranks)
    except KeyboardInterrupt:
        if not is_quiet():
            print(interrupted, file=sys.stderr)
        raise
    if not ranks.is_first:
        return
    if json_:
        print(json.dumps({"out": str(out), **scores.model_dump(mode="json", by_alias=True)}))
        return

    from moetune.report.console import terminal

    console = terminal()
    console.print(_table(scores))
    for line in (
        f"{scores.tokens:,} tokens, {scores.loss_tokens:,} of them carry loss",
        f"written to {out}; moetune select {out} --k 2 says which experts to train",
    ):
        console.print(line, highlight=False, soft_wrap=True)


def _predict(config: RunConfig, data: list[str] | None, gpu: str | None, json_: bool) -> None:
    """What scoring takes. Exit code 1: it does not fit."""
    import json

    from moetune.models.catalog.gpus import find_gpu

    if gpu is not None:
        find_gpu(gpu)
    with heavy_imports():
        from moetune.report.console import terminal
        from moetune.report.terminal import print_report
        from moetune.routing.memory import predict_score
        from moetune.routing.score import names_of, to_score
        from moetune.run.resolve import resolve

    report = predict_score(resolve(to_score(config), "cuda"), len(data or names_of(config)) or 1, gpu=gpu)
    if json_:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print_report(report, terminal())
    if report.fits is False:
        raise typer.Exit(1)


def _table(scores: Scores) -> Table:
    from rich.table import Table

    table = Table(title=f"experts of {scores.model}, by tokens that carry loss", title_justify="left")
    for column in ("layer", "most used, with the share of tokens", "fullest over mean", "entropy, nats", "unused"):
        table.add_column(column, justify="left" if column.startswith("most") else "right")
    for index, layer in scores.layers.items():
        share = layer.loss.share
        first = sorted(range(layer.num_experts), key=lambda expert: (-share[expert], expert))[:4]
        entropy = "" if layer.loss.entropy is None else f"{layer.loss.entropy:.2f}"
        table.add_row(
            str(index),
            ", ".join(f"{expert} {100 * share[expert]:.1f} %" for expert in first),
            f"{max(share) * layer.num_experts:.2f}",
            entropy,
            str(len(layer.loss.unused)),
        )
    return table
