"""`moetune quantize`: write a quantized copy of a checkpoint, or measure what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moetune.cli import options as cli
from moetune.config.load import load_run_config, parse, read_run_config, refuse_missing
from moetune.config.memory_size import HOW_TO_WRITE_A_SIZE, parse_size
from moetune.errors import DoesNotFit, UserError, counted
from moetune.report.console import terminal

if TYPE_CHECKING:
    from moetune.inference.rounding import Rounding


def _word_or_map(param: typer.CallbackParam, value: str) -> str:
    return value if value.startswith("{") else str(cli.one_of(param, value))


def quantize(
    context: typer.Context,
    model: Annotated[str, cli.argument("MODEL", "A catalog name, a folder or a hub id.")],
    out: Annotated[
        Path | None, cli.option(None, "Output folder; an incomplete one is continued. Only --predict needs none.")
    ] = None,
    base: Annotated[
        str,
        cli.option(
            f"auto|{cli.FORMATS}",
            "Format of the quantized weights; auto: as published, or nf4. Or several, as in a run file: "
            "'{default: nf4, layers: {0: bf16}}'.",
            check=_word_or_map,
        ),
    ] = "auto",
    double_quant: Annotated[bool | None, cli.option(None, "8-bit scales for nf4. Default: yes.")] = None,
    measure: Annotated[
        str | None, cli.option("DATA", "Write nothing: measure on these data what each layer's rounding costs.")
    ] = None,
    budget: Annotated[
        str | None,
        cli.option(
            "SIZE|RUN.yaml",
            "With --measure: say what to leave in 16 bits with this much more memory, or what a run leaves free.",
        ),
    ] = None,
    tokens: Annotated[int, cli.number("With --measure: tokens to read.", metavar="N")] = 32_768,
    sequence_length: Annotated[
        int, cli.number("With --measure: largest number of tokens of a record.", 2, 2**24, "N")
    ] = 2048,
    format_: cli.DataFormat = None,
    overwrite: cli.Overwrite = False,
    predict: cli.Predict = False,
    gpu: cli.OnCard = None,
    json_: cli.Json = False,
) -> None:
    """Write a quantized copy of a model. To train on it, give its folder as model.path. With --measure, print what
    rounding each layer costs in held-out loss. Exit code 1: it needs more memory than there is."""
    cli.refuse_card(gpu, predict)
    if measure is not None:
        cli.refuse_given(context, "is for writing; leave it out with --measure", "out", "overwrite", "predict")
        if base.startswith("{"):
            raise UserError(f"--base {base!r}: --measure rounds to one format; give its name")
        storage = "nf4" if base == "auto" else base
        is_run = budget is not None and Path(budget).is_file()
        if budget is not None and not is_run and (parse_size(budget) or 0) <= 0:
            raise UserError(f"--budget {budget!r} is no size above zero, and no run file. {HOW_TO_WRITE_A_SIZE}")
        refuse_missing([measure])
        left = _left_by(str(budget), storage) if is_run else parse_size(budget or "")
        with cli.heavy_imports():
            from moetune.inference.rounding import measure as measured

        how: dict[str, Any] = {"storage": storage, "double_quant": double_quant is not False}
        how |= {"budget": left, "tokens": tokens, "sequence_length": sequence_length}
        result = measured(model, measure, format=format_, **how)
        cli.answer(json_, result.to_json(), *_shown(result))
        return
    cli.refuse_given(context, "needs --measure DATA", "budget", "tokens", "sequence_length", "format_")
    if out is None and not predict:
        raise UserError("quantize needs --out, the folder to write to")
    with cli.heavy_imports():
        from moetune.adapt.weights.quantize import quantize as write_base
        from moetune.memory.host import process_here
        from moetune.report.progress import loading_progress
        from moetune.run.resolve import resolve_model

        process_here()  # before the imports that only a prediction needs
        from moetune.memory.commands.quantizing import predict_quantize
        from moetune.planning.at_hand import refuse_unfit, surely_below

    # All weights are read in the checkpoint's own dtype; what it publishes quantized is rounded to bf16.
    how = {"path": model, "base": parse(base, "--base"), "dtype": "bf16", "attention": "eager"}
    if double_quant is not None:
        how["double_quant"] = double_quant
    resolved = resolve_model(read_run_config({"model": how, "adapt": {}}, (), "quantize").model)
    if predict:
        report = predict_quantize(resolved, cli.target(gpu)[1])
        cli.answer_prediction(json_, report)
        return
    assert out is not None
    if resolved.source.local_folder() is not None and resolved.source.quantized_base is None:
        refuse_unfit("quantize", surely_below(resolved.structure), lambda card: predict_quantize(resolved, card))
    with loading_progress(terminal(stderr=True), model) as on_read:
        written = write_base(resolved, out, on_read, overwrite=overwrite)
    files = counted(written["files"], "file")
    cli.answer(json_, {"out": str(out), **written}, f"{out}: {written['bytes']:,} bytes in {files}")


def _left_by(file: str, storage: str) -> int:
    """Return the bytes that a run whose base is all in `storage` surely leaves free of its GPU; raise `UserError` if
    the run file names no GPU, `DoesNotFit` if there are none."""
    with cli.heavy_imports():
        from moetune.planning.predict import predict

    report = predict(load_run_config(file, (f"model.base={storage}",)), advise=False)
    if report.gpu is None:
        raise UserError(f"--budget: {file!r} names no GPU; set hardware.gpu there, or give a size")
    if report.least_headroom <= 0:
        raise DoesNotFit(f"--budget: {file!r} leaves nothing of {report.gpu.name} free", report.to_json())
    return report.least_headroom


def _shown(result: Rounding) -> list[Any]:
    """Return a table of costs with a row for each layer, and sentences; for a budget also lines of a run file."""
    from moetune.report.units import gib
    from moetune.report.view import Table, ViewSection

    names = list(dict.fromkeys(cost.part for cost in result.parts))
    costs = {(cost.layer, cost.part): cost for cost in result.parts}
    layers = sorted({cost.layer for cost in result.parts})
    rows = [
        (str(layer), *(f"{costs[layer, name].cost:.4f}" if (layer, name) in costs else "" for name in names))
        for layer in layers
    ]
    sizes = ("16 bits take", *(gib(max(cost.bytes for cost in result.parts if cost.part == name)) for name in names))
    table = Table((">layer", *(f">{name.replace('_', ' ')}" for name in names)), rows, [sizes])
    title = f"nats a token that rounding to {result.storage} costs, one part of one layer at a time"
    shown: list[Any] = [
        ViewSection(title, table),
        f"loss in 16 bits {result.loss:.4f}; all in {result.storage} {result.rounded_loss:.4f}; "
        f"{result.tokens:,} predicted tokens of {result.data}",
    ]
    if result.base is not None:
        import yaml

        written = yaml.safe_dump({"base": result.base}, default_flow_style=True, width=100, sort_keys=False)
        shown += [f"with {gib(result.base_bytes or 0)} more: loss {result.base_loss:.4f}", f"model:\n  {written[1:-2]}"]
    return shown
