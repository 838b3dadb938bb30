"""`moetune quantize`: pack a checkpoint once, to load it in a fraction of the time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.imports import heavy_imports
from moetune.cli.options import Json, checked_base
from moetune.errors import counted


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A catalog name, a folder or a hub id.")],
    out: Annotated[Path, typer.Option(help="The folder to write. One that was begun is continued.")],
    base: Annotated[
        str,
        typer.Option(metavar="auto|nf4|int8|mxfp4", help="Precision of what is packed; auto: as published, or nf4."),
    ] = "auto",
    double_quant: Annotated[
        bool | None, typer.Option(help="8-bit scales of nf4, which is the default.", show_default=False)
    ] = None,
    json_: Json = False,
) -> None:
    """Write the packed base of a model once. Give the folder as model.path to train on it."""
    if base != "auto":
        checked_base(base)

    import json

    from moetune.report.console import terminal

    with heavy_imports():
        from moetune.adapt.weights.quantize import quantize as pack
        from moetune.config.load import read_run_config
        from moetune.report.progress import reading
        from moetune.run.resolve import resolve_model

    # What is packed is rounded to bf16 first, as in a run that computes in it; all else keeps its dtype.
    how: dict[str, object] = {"path": model, "base": base, "dtype": "bf16", "attention": "eager"}
    if double_quant is not None:
        how["double_quant"] = double_quant
    resolved = resolve_model(read_run_config({"model": how, "adapt": {}}, (), "quantize").model)
    with reading(terminal(stderr=True), model) as on_read:
        written = pack(resolved, out, on_read)
    if json_:
        print(json.dumps({"schema": 1, "out": str(out), **written}))
    else:
        print(f"{out}: {written['bytes']:,} bytes in {counted(written['files'], 'file')}")
