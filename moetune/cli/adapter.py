"""`moetune adapter check|convert|merge|diff`: LoRA adapters of any program, and their base."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moetune.atomic import is_occupied
from moetune.cli import options as cli
from moetune.errors import counted, note
from moetune.files import expanded

if TYPE_CHECKING:
    from moetune.exporting.adapter import AdapterWritten

_LAYOUTS = "peft|peft-0.18|unsloth-grouped|megatron|per-expert|3d"
_PROGRAMS = "peft|vllm|sglang|llama.cpp|unsloth|unsloth-grouped"

Base = Annotated[str, cli.argument("BASE", "The model that it was trained on: a folder, a catalog name or a hub id.")]
AdapterFolder = Annotated[Path, cli.argument("ADAPTER_DIR", "The adapter's folder.")]
From = Annotated[Any, cli.choice(_LAYOUTS, "The layout that it is in, if that cannot be detected.", "--from")]

adapter = typer.Typer(
    help="Check, convert, merge and compare LoRA adapters, whichever program wrote them.", no_args_is_help=True
)


@adapter.command(epilog="Example: moetune adapter check mixtral-8x7b out/adapter --for vllm")
def check(
    base: Base,
    adapter: AdapterFolder,
    from_: From = None,
    for_: Annotated[Any, cli.choice(_PROGRAMS, "Also answer no if this program would not read it.", "--for")] = None,
    json_: cli.Json = False,
) -> None:
    """Show which layers, experts and projections an adapter has factors of, and what of it would be ignored."""
    with cli.heavy_imports():
        from moetune.exporting.adapter import check_adapter
        from moetune.report.adapter import report_view
    report = check_adapter(base, adapter, layout=from_, program=for_)
    cli.answer(json_, report.to_json(), report_view(report), fails=bool(report.problems))


@adapter.command(epilog="Example: moetune adapter convert mixtral-8x7b out/adapter --to vllm --out out/served")
def convert(
    base: Base,
    adapter: AdapterFolder,
    to: Annotated[Any, cli.choice(_PROGRAMS, "The program that shall read it.", "--to")],
    out: cli.NewFolder,
    from_: From = None,
    overwrite: cli.Overwrite = False,
    json_: cli.Json = False,
) -> None:
    """Write an adapter in the layout of another program, without a change to what it computes."""
    is_occupied(expanded(out), overwrite)
    with cli.heavy_imports():
        from moetune.exporting.adapter import convert_adapter
    written = convert_adapter(base, adapter, to, out, layout=from_, overwrite=overwrite)
    _print(json_, written, f"for {to}: {counted(written.tensors, 'tensor')}", to=to)


@adapter.command(epilog="Example: moetune adapter merge mixtral-8x7b out/adapter --out out/merged")
def merge(
    base: Base,
    adapter: AdapterFolder,
    out: cli.NewFolder,
    from_: From = None,
    overwrite: cli.Overwrite = False,
    json_: cli.Json = False,
) -> None:
    """Write the base checkpoint with an adapter in it, which any program reads as it reads the base."""
    is_occupied(expanded(out), overwrite)
    with cli.heavy_imports():
        from moetune.exporting.adapter import merge_adapter
    written = merge_adapter(base, adapter, out, layout=from_, overwrite=overwrite)
    _print(json_, written, f"merged: {counted(written.tensors, 'tensor')} changed")


@adapter.command(epilog="Example: moetune adapter diff out/adapter out/served")
def diff(
    a: Annotated[Path, cli.argument("A", "The folder of an adapter.")],
    b: Annotated[Path, cli.argument("B", "The folder of the other.")],
    base: Annotated[str | None, cli.option("BASE", "Their base; by default the one that A names.")] = None,
    from_a: Annotated[Any, cli.choice(_LAYOUTS, "The layout of A, as --from of the others.", "--from-a")] = None,
    from_b: Annotated[Any, cli.choice(_LAYOUTS, "The layout of B.", "--from-b")] = None,
    json_: cli.Json = False,
) -> None:
    """Show where the updates of two adapters differ, whatever their layouts, ranks and scales."""
    with cli.heavy_imports():
        from moetune.exporting.adapter import diff_adapters
        from moetune.report.adapter import difference_view
    difference = diff_adapters(a, b, base=base, layouts=(from_a, from_b))
    cli.answer(json_, difference.to_json(), difference_view(difference), fails=not difference.equal)


def _print(json_: bool, written: AdapterWritten, done: str, **keys: str) -> None:
    """Print what `convert` or `merge` wrote, after the words `done`; `keys` are further JSON keys and their values."""
    note(*written.reasons, *written.notes)
    cli.answer(json_, {**written.to_json(), **keys}, f"{done}, {written.bytes:,} bytes, in {written.out}")
