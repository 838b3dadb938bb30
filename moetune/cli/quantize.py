"""The command `moetune quantize`: write a quantized copy of a checkpoint, which loads faster than the original."""

from pathlib import Path
from typing import Annotated

from moetune.cli import options as cli
from moetune.errors import UserError, counted
from moetune.report.console import terminal


def quantize(
    model: Annotated[str, cli.argument("MODEL", "A catalog name, a folder or a hub id.")],
    out: Annotated[
        Path | None, cli.option(None, "Output folder; an incomplete one is continued. Only --predict needs none.")
    ] = None,
    base: Annotated[
        str, cli.choice(f"auto|{cli.FORMATS}", "Format of the quantized weights; auto: as published, or nf4.")
    ] = "auto",
    double_quant: Annotated[bool | None, cli.option(None, "8-bit scales for nf4. Default: yes.")] = None,
    overwrite: cli.Overwrite = False,
    predict: cli.Predict = False,
    gpu: cli.OnCard = None,
    json_: cli.Json = False,
) -> None:
    """Write a quantized copy of a model. To train on it, give its folder as model.path. Exit code 1: it needs more
    memory than there is."""
    cli.refuse_card(gpu, predict)
    if out is None and not predict:
        raise UserError("quantize needs --out, the folder to write to")
    with cli.heavy_imports():
        from moetune.adapt.weights.quantize import quantize as write_base
        from moetune.config.load import read_run_config
        from moetune.memory.host import process_here
        from moetune.report.progress import loading_progress
        from moetune.run.resolve import resolve_model

        process_here()  # before the imports that only a prediction needs
        from moetune.memory.commands.quantizing import predict_quantize
        from moetune.planning.at_hand import refuse_unfit, surely_below

    # All weights are read in the checkpoint's own dtype; what it publishes quantized is rounded to bf16.
    how: dict[str, object] = {"path": model, "base": base, "dtype": "bf16", "attention": "eager"}
    if double_quant is not None:
        how["double_quant"] = double_quant
    resolved = resolve_model(read_run_config({"model": how, "adapt": {}}, (), "quantize").model)
    if predict:
        report = predict_quantize(resolved, cli.target(gpu)[1])
        cli.answer_prediction(json_, report)
        return
    assert out is not None
    if resolved.source.local_folder() is not None and resolved.source.quantized_base is None:
        refuse_unfit("quantize", surely_below(resolved.structure), lambda here: predict_quantize(resolved, here))
    with loading_progress(terminal(stderr=True), model) as on_read:
        written = write_base(resolved, out, on_read, overwrite=overwrite)
    files = counted(written["files"], "file")
    cli.answer(json_, {"out": str(out), **written}, f"{out}: {written['bytes']:,} bytes in {files}")
