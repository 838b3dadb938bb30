"""`moetune eval`: held-out loss of a run, an export or a model."""

from __future__ import annotations

from typing import Annotated

import typer

from moetune.cli.imports import heavy_imports
from moetune.cli.options import Json, KeepQuantized, Opens
from moetune.config.load import refuse_missing


def eval_(
    model: Opens,
    data: Annotated[
        str | None, typer.Option(metavar="DATA", help="As data.train in a run file; by default what the run held out.")
    ] = None,
    format_: Annotated[str | None, typer.Option("--format", help="As data.format; by default the run's.")] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(min=2, max=2**24, metavar="N", help="Tokens a record may have; by default the run's, or 2048."),
    ] = None,
    base: KeepQuantized = None,
    json_: Json = False,
) -> None:
    """Held-out loss, perplexity and tokens of a run, an adapter, a merged checkpoint or a base: comparable numbers."""
    import json

    from moetune.cli.options import checked_base, checked_format, opened

    checked_format(format_)
    checked_base(base)
    refuse_missing([] if data is None else [data])
    with heavy_imports():
        from moetune.inference.evaluate import evaluate

    found = evaluate(opened(model, base), data, sequence_length, format_)
    if json_:
        print(json.dumps(found.to_json()))
        return
    which = ", which the run trained on" if found.held_out is False else ""
    kind = "held-out loss" if found.held_out else "loss"
    print(f"{kind} {found.loss:.4f}, perplexity {found.perplexity:.4g}")
    print(f"{found.tokens:,} predicted tokens in {found.records:,} sequences of {found.data}{which}")
