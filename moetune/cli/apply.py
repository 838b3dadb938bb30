"""`moetune apply`: write a checkpoint from a base and a delta."""

from pathlib import Path
from typing import Annotated

from moetune.atomic import is_occupied
from moetune.cli import options as cli
from moetune.errors import note
from moetune.files import expanded
from moetune.report.console import terminal


def apply(
    delta: Annotated[Path, cli.argument("DELTA_DIR", "The folder of a delta.")],
    to: Annotated[
        str,
        cli.option("MODEL", "The base of the delta: a folder, or a name whose weights are on this machine."),
    ],
    out: cli.NewFolder,
    force: Annotated[
        str | None, cli.option("NAME", "Apply even if MODEL is not the delta's base; repeat its name, or its folder's.")
    ] = None,
    overwrite: cli.Overwrite = False,
    json_: cli.Json = False,
) -> None:
    """Write a copy of a checkpoint with the tensors of a delta. Refuse a checkpoint other than the delta's base."""
    is_occupied(expanded(out), overwrite)
    with cli.heavy_imports():
        from moetune.exporting.apply import apply_delta
        from moetune.report.progress import loading_progress

    with loading_progress(terminal(stderr=True), to, passes=2) as on_read:
        result = apply_delta(delta, to, out, force=force, overwrite=overwrite, on_read=on_read)
    note(*result.notes)
    cli.answer(json_, result.to_json(), f"applied {result.tensors} tensors, {result.bytes:,} bytes, in {result.out}")
