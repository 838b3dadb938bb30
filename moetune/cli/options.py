"""Options that several commands share, and how they read a run file."""

from __future__ import annotations

import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from moetune.cli.imports import heavy_imports
from moetune.config.fields import LARGEST
from moetune.config.load import load_run_config
from moetune.config.schema import DataConfig, QuantizedDtype, RunConfig
from moetune.errors import UserError, counted, shown, suggest
from moetune.files import expanded, names_in, refuse_taken
from moetune.report.console import note

if TYPE_CHECKING:
    from moetune.inference.opened import Opened

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the run file; repeatable."),
]
Router = Annotated[
    str | None, typer.Option(metavar="LAYERS", help="Of a MODEL: routers of these layers train, such as all or 0-5.")
]
Experts = Annotated[
    str | None,
    typer.Option(metavar="LAYERS:EXPERTS", help="Of a MODEL: these experts of these layers train, such as 0-5:0,1."),
]
Lora = Annotated[
    int | None,
    typer.Option(metavar="RANK", min=1, max=LARGEST, help="Of a MODEL: LoRA on attention and experts trains."),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print formulas, single allocations and assumptions.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Tokens = Annotated[
    int | None,
    typer.Option("--tokens", min=1, max=2**60, help="Of the data: say how many hours they take.", show_default=False),
]
Opens = Annotated[
    str,
    typer.Argument(
        metavar="RUN_DIR|MODEL",
        help="A run folder, an adapter or checkpoint that was exported, a catalog name or a hub id.",
        show_default=False,
    ),
]


def a_run(folder: Path) -> Path:
    """Raises `UserError` before what takes seconds if it is not there."""
    if not expanded(folder).is_dir():
        raise UserError(f"run folder {str(folder)!r} does not exist.{suggest(folder.name, names_in(folder.parent))}")
    return folder


TrainedRun = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.", show_default=False, callback=a_run)
]
KeepQuantized = Annotated[
    str | None,
    typer.Option("--base", metavar="nf4|int8|mxfp4", help="Keep a model packed; a run is as in training."),
]


def in_a_folder(file: Path | None) -> Path | None:
    """A file that a command shall write; raises `UserError` before what takes minutes if its folder is not there."""
    if file is None:
        return None
    file = expanded(file)
    if not file.parent.is_dir():
        raise UserError(f"{str(file)!r} cannot be written: there is no folder {str(file.parent)!r}; make it first")
    return file


def checked_temperature(value: float) -> float:
    """Raises `UserError` for one that probabilities cannot be computed with."""
    if value == 0 or 1e-3 <= value <= 1e3:
        return value
    raise UserError(f"--temperature {value}: it is 0, or from 0.001 to 1000")


def checked_text(text: str | None) -> str:
    """Raises `UserError` for bytes that are no text."""
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise UserError(f"{shown(text)} is not UTF-8; give it as text in UTF-8") from None
    return text or ""


def output_file(file: Path | None) -> Path | None:
    """The same; raises `UserError` too if what has that name is not ours to replace, as an input of the command is."""
    if (file := in_a_folder(file)) is not None:
        refuse_taken(file)
    return file


Page = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also write one self-contained page.", callback=output_file)
]
Picture = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also write a picture, .png or .svg.", callback=output_file)
]


def checked_base(base: str | None) -> QuantizedDtype | None:
    """Raises `UserError` for a precision that nothing is packed in."""
    if base is None or base in typing.get_args(QuantizedDtype):
        return cast("QuantizedDtype | None", base)
    raise UserError(f"--base {base!r}: it is nf4, int8 or mxfp4, or left out for the checkpoint as it is")


def opened(model: str, base: str | None) -> Opened:
    """The model of an argument; what a user should know of it is said."""
    packed = checked_base(base)
    with heavy_imports():
        from moetune.inference.opened import open_model
    found = open_model(model, base=packed)
    for text in found.notes:
        note(text)
    return found


def checked_format(format: str | None) -> None:
    """Raises `UserError` for a format that no data have."""
    known = typing.get_args(DataConfig.model_fields["format"].annotation)
    if format is not None and format not in known:
        raise UserError(f"--format {format!r}: it may be {', '.join(known)}.{suggest(format, known)}")


def read_run(path: Path | str, overrides: Sequence[str] | None) -> RunConfig:
    """The run file, with a number of experts in the place of a budget of memory. Raises `UserError`."""
    return within_memory(load_run_config(path, overrides or ()))


def within_memory(config: RunConfig) -> RunConfig:
    """The run with a number of experts in the place of a budget of memory. Raises `UserError`."""
    if not config.adapt.has_memory_budget:
        return config
    with heavy_imports():
        from moetune.routing.budget import within_budget

    def tried(k: int, fits: bool) -> None:
        print(f"{counted(k, 'expert')} of each layer: {'fits' if fits else 'does not fit'}", file=sys.stderr)

    return within_budget(config, tried)
