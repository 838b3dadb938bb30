"""`moetune quantize`: pack a checkpoint once, to load it in a fraction of the time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.imports import heavy_imports
from moetune.cli.options import Json


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A catalog name, a folder or a hub id.")],
    out: Annotated[Path, typer.Option(help="The folder to write. One that was begun is continued.")],
    base: Annotated[str, typer.Option(metavar="nf4|int8", help="Precision of what is packed.")] = "nf4",
    double_quant: Annotated[bool, typer.Option(help="8-bit scales of nf4.")] = True,
    json_: Json = False,
) -> None:
    """Write the packed base of a model once. Give the folder as model.path to train on it."""
    from moetune.errors import UserError

    if base not in ("nf4", "int8"):
        raise UserError(f"--base {base!r}: it is nf4 or int8; other precisions are not packed")

    import json

    from moetune.report.console import terminal

    with heavy_imports():
        from moetune.adapt.quantize import quantize as pack
        from moetune.run.resolve import resolve_model
        from moetune.run_file import read_run_config
        from moetune.training.progress import reading

    # neither the dtype of compute nor attention is in what is written
    how = {"path": model, "base": base, "double_quant": double_quant, "dtype": "bf16", "attention": "eager"}
    resolved = resolve_model(read_run_config({"model": how, "adapt": {}}, (), "quantize").model)
    with reading(terminal(stderr=True), model) as on_read:
        written = pack(resolved, out, on_read)
    if json_:
        print(json.dumps({"schema": 1, "out": str(out), **written}))
    else:
        print(f"{out}: {written['bytes']:,} bytes in {written['files']} files")
