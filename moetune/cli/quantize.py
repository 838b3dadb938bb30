"""The command `moetune quantize`: write a quantized copy of a checkpoint, which loads faster than the original."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from moetune.cli.options import Json, Overwrite, answer, argument, choice, heavy_imports, option
from moetune.errors import counted
from moetune.report.console import terminal


def quantize(
    model: Annotated[str, argument("MODEL", "A catalog name, a folder or a hub id.")],
    out: Annotated[Path, option(None, "Output folder. An incomplete one is continued.")],
    base: Annotated[
        str, choice("auto|nf4|int8|fp8|nvfp4|mxfp4", "Format of the quantized weights; auto: as published, or nf4.")
    ] = "auto",
    double_quant: Annotated[bool | None, option(None, "8-bit scales for nf4. Default: yes.")] = None,
    overwrite: Overwrite = False,
    json_: Json = False,
) -> None:
    """Write a quantized copy of a model. To train on it, give its folder as model.path."""
    with heavy_imports():
        from moetune.adapt.weights.quantize import quantize as write_base
        from moetune.config.load import read_run_config
        from moetune.report.progress import loading_progress
        from moetune.run.resolve import resolve_model

    # All weights are read in the checkpoint's own dtype; what it publishes quantized is rounded to bf16.
    how: dict[str, object] = {"path": model, "base": base, "dtype": "bf16", "attention": "eager"}
    if double_quant is not None:
        how["double_quant"] = double_quant
    resolved = resolve_model(read_run_config({"model": how, "adapt": {}}, (), "quantize").model)
    with loading_progress(terminal(stderr=True), model) as on_read:
        written = write_base(resolved, out, on_read, overwrite=overwrite)
    files = counted(written["files"], "file")
    answer(json_, {"out": str(out), **written}, f"{out}: {written['bytes']:,} bytes in {files}")
