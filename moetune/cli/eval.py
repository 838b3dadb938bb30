"""The command `moetune eval`: print the held-out loss of a run, an adapter or a checkpoint."""

from __future__ import annotations

from typing import Annotated

from moetune.cli.options import DataFormat, Json, KeepQuantized, Opens, answer, heavy_imports, number, opened, option
from moetune.config.load import refuse_missing


def eval_(
    model: Opens,
    data: Annotated[str | None, option("DATA", "Data, as under data.train. Default: the run's held-out data.")] = None,
    format_: DataFormat = None,
    sequence_length: Annotated[
        int | None, number("Largest number of tokens of a record. Default: the run's, or 2048.", 2, 2**24, "N")
    ] = None,
    base: KeepQuantized = None,
    json_: Json = False,
) -> None:
    """Print the held-out loss and perplexity of a run, an adapter, a checkpoint or a base, all computed alike."""
    refuse_missing([] if data is None else [data])
    with heavy_imports():
        from moetune.inference.evaluate import evaluate

    found = evaluate(opened(model, base), data, sequence_length, format_)
    which = ", which the run trained on" if found.held_out is False else ""
    kind = "held-out loss" if found.held_out else "loss"
    answer(
        json_,
        found.to_json(),
        f"{kind} {found.loss:.4f}, perplexity {found.perplexity:.4g}",
        f"{found.tokens:,} predicted tokens in {found.records:,} sequences of {found.data}{which}",
    )
