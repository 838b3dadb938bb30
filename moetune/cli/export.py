"""`moetune export`: a run's result in a format that others read."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.imports import heavy_imports
from moetune.cli.options import Json


class Format(StrEnum):
    """What a result can become."""

    delta = "delta"
    peft = "peft"
    merged = "merged"


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.", show_default=False)],
    format_: Annotated[
        Format,
        typer.Option(
            "--format",
            help="Changed tensors only, a PEFT adapter, or a whole checkpoint.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to; a new or empty folder.", show_default=False)],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is in DIR.")] = False,
    check: Annotated[
        int,
        typer.Option(
            min=0, max=1000, metavar="N", help="With merged: compare N prompts' logits with the trained model's."
        ),
    ] = 0,
    json_: Json = False,
) -> None:
    """Write what the newest checkpoint of a run holds as a delta, a PEFT adapter or a merged checkpoint."""
    from moetune.errors import UserError

    if check and format_ is not Format.merged:
        raise UserError(f"--check compares a merged checkpoint; with --format {format_.value} there is none")

    import json
    import sys

    with heavy_imports():
        from moetune.exporting.export import export as export_trained

    result = export_trained(run, format_.value, out, overwrite=overwrite, check=check)
    for note in result.notes:
        print(f"note: {note}", file=sys.stderr)
    if json_:
        print(json.dumps(result.to_json()))
        return
    print(f"{result.format} of step {result.step}: {result.tensors} tensors, {result.bytes:,} bytes, in {result.out}")
    if result.check is not None:
        found = f"largest relative difference {result.check.max_relative_difference:.1e}"
        print(f"logits of {result.check.prompts} prompts of {result.check.of}: {found}")
