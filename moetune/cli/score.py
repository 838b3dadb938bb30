"""`moetune score`: which experts a data set uses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moetune.cli.imports import heavy_imports
from moetune.cli.options import Json, Overrides, in_a_folder

if TYPE_CHECKING:
    from rich.table import Table

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
    tokens: Annotated[int, typer.Option(min=1, help="Of each FILE.")] = 131_072,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output.")] = False,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Count what each expert of a base receives from data: tokens, gate weight, REAP's score, pairs, by layer."""
    from moetune.errors import UserError
    from moetune.run_file import load_run_config, read_run_config

    if model.endswith((".yaml", ".yml")):
        config = load_run_config(model, set_ or ())
    elif set_:
        raise UserError("--set changes a run file; give one in the place of MODEL")
    else:
        config = read_run_config({"model": {"path": model}, "adapt": {"router": "all"}}, (), "score")
    if not data and config.data is None:
        raise UserError("moetune score needs --data FILE, or data: in the run file")

    import json
    import sys

    with heavy_imports():
        from moetune.run.dtypes import this_device
        from moetune.run.resolve import resolve
        from moetune.scoring.score import names_of, to_score
        from moetune.scoring.score import score as score_run

    names = data or names_of(config)
    try:
        scores = score_run(resolve(to_score(config), this_device()), names, tokens, out, overwrite=overwrite)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        raise
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
