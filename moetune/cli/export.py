"""`moetune export`: a run's result in a format that others read."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.imports import heavy_imports
from moetune.cli.options import Json, TrainedRun
from moetune.files import expanded, is_occupied


class Format(StrEnum):
    """What a result can become."""

    delta = "delta"
    peft = "peft"
    merged = "merged"
    vllm = "vllm"


def export(
    run: TrainedRun,
    format_: Annotated[
        Format,
        typer.Option(
            "--format",
            help="Changed tensors only, a PEFT adapter, a whole checkpoint, or an adapter for vLLM.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to; a new or empty folder.", show_default=False)],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is in DIR.")] = False,
    check: Annotated[
        int,
        typer.Option(
            min=0, max=1000, metavar="N", help="Compare the loss on N held-out records with the trained model's."
        ),
    ] = 0,
    push: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="Also upload it to the hub, private, with a model card.")
    ] = None,
    json_: Json = False,
) -> None:
    """Write what the newest checkpoint of a run holds as a delta, an adapter (PEFT, vLLM) or a merged checkpoint."""
    from moetune.errors import UserError, counted

    if check and format_ in (Format.delta, Format.vllm):
        raise UserError(
            f"--check computes with stock transformers and PEFT, which do not read --format {format_.value}; check "
            "merged or peft"
        )

    import json

    from moetune.report.console import note

    is_occupied(expanded(out), overwrite)
    with heavy_imports():
        from moetune.exporting.export import export as export_trained

    if push is not None:
        from moetune.exporting.push import check_push

        check_push(push)
    result = export_trained(run, format_.value, out, overwrite=overwrite)
    for text in result.notes:
        note(text)
    checked = None
    if check:
        with heavy_imports():
            from moetune.inference.check import check_export

        checked = check_export(run, out, check)
    address = None
    if push is not None:
        from moetune.exporting.push import push as push_to_hub

        address = push_to_hub(run, out, format_.value, push)
    if json_:
        print(json.dumps({**result.to_json(), "check": checked and checked.to_json(), "pushed": address}))
        return
    tensors = counted(result.tensors, "tensor")
    print(f"{result.format} of step {result.step}: {tensors}, {result.bytes:,} bytes, in {result.out}")
    if checked is not None:
        losses = f"{checked.trained_loss:.4f} trained, {checked.exported_loss:.4f} exported"
        print(f"loss on {counted(checked.rows, 'record')} of {checked.of}, {checked.tokens:,} tokens: {losses}")
    if address is not None:
        print(f"pushed to {address}")
