"""Shared by commands: options and checks, reading a run file, opening a model, printing."""

from __future__ import annotations

import atexit
import gc
import json
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moetune.config.fields import LARGEST
from moetune.config.load import load_run_config
from moetune.config.schema import DataConfig, HardwareConfig, QuantizedDtype, RunConfig
from moetune.errors import UserError, counted, note, shown, suggest
from moetune.files import expanded, names_in, refuse_taken
from moetune.report.console import terminal

if TYPE_CHECKING:
    from moetune.inference.opened import Opened
    from moetune.memory.report import MemoryReport
    from moetune.models.catalog.gpus import Gpu
    from moetune.run.dtypes import DeviceType


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Import torch and similar packages inside this context, in two thirds of the time.

    These imports create half a million objects that are never freed. The garbage collector is off during the imports,
    and afterwards the objects are frozen (`gc.freeze`), so that it does not search them later either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)  # Triton 3.9 tells of what is not freed at the end


# --- Checks, before what takes seconds ----------------------------------------------------------------------------


def one_of(param: typer.CallbackParam, value: str | None) -> str | None:
    """Return `value` if it is None, or in the list that is the option's metavar, such as `a|b|c`; else raise
    `UserError`."""
    *rest, last = known = str(param.metavar).split("|")
    if value is None or value in known:
        return value
    hint = suggest(value, known)
    raise UserError(f"{param.opts[0]} {value!r}: give {', '.join(rest)} or {last}{hint and '.'}{hint}")


def known_gpu(value: str | None) -> str | None:
    """Return `value` if it is a GPU in the catalog, a size such as `44GiB`, or None; else raise `UserError`."""
    from moetune.models.catalog.gpus import find_gpu

    if value is not None:
        find_gpu(value)
    return value


def existing_run(folder: Path) -> Path:
    """Return the path of an existing folder, with `~` expanded; raise `UserError` if there is none."""
    folder = expanded(folder)
    if folder.is_file():
        raise UserError(f"{str(folder)!r} is a file; give the folder of a run, which is the output of its run file")
    if not folder.is_dir():
        raise UserError(f"run folder {str(folder)!r} does not exist.{suggest(folder.name, names_in(folder.parent))}")
    return folder


def in_a_folder(file: Path | None) -> Path | None:
    """Return the path of a file to write, with `~` expanded; None for None. Raise `UserError` if its folder
    does not exist."""
    if file is None:
        return None
    file = expanded(file)
    if not file.parent.is_dir():
        raise UserError(f"{str(file)!r} cannot be written: there is no folder {str(file.parent)!r}; create it first")
    return file


def output_file(file: Path | None) -> Path | None:
    """Return the path of a file to write, with `~` expanded; raise `UserError` if its folder does not exist.

    Also raise `UserError` for a file that exists and is no page or picture that moetune wrote: the command's inputs,
    for example, must not be overwritten.
    """
    if (file := in_a_folder(file)) is not None:
        refuse_taken(file)
    return file


def picture(file: Path | None) -> Path | None:
    """Return the path of a picture to write, as `output_file`; raise `UserError` for a suffix other than .png or .svg,
    a folder that does not exist, and a file that moetune did not write."""
    if file is not None and file.suffix.lower() not in (".png", ".svg"):
        raise UserError(f"{str(file)!r}: a figure is .png or .svg, not {file.suffix or 'without suffix'!r}")
    return output_file(file)


def utf8(text: str | None) -> str | None:
    """Return the text unchanged; raise `UserError` if it cannot be encoded as UTF-8."""
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        raise UserError(f"{shown(text)} is not UTF-8; give UTF-8 text") from None
    return text


def refuse_set(settings: Sequence[str] | None, remedy: str) -> None:
    """Raise `UserError` if there are `--set` settings; call it when a command was given no run file.

    `remedy`, the end of the message, says how to give one.
    """
    if settings:
        raise UserError(f"--set changes a run file; {remedy}")


def refuse_card(gpu: str | None, predict: bool) -> None:
    """Raise `UserError` if a command was given `--gpu` without `--predict`."""
    if gpu is not None and not predict:
        raise UserError("--gpu is the card that --predict predicts for; the command itself uses this machine's GPU")


def refuse_given(context: typer.Context, reason: str, *names: str) -> None:
    """Raise `UserError` if one of the running command's parameters `names` is on its command line, even with its
    default value. The message is the option's name and `reason`."""
    for param in context.command.params:
        source = context.get_parameter_source(str(param.name))
        if param.name in names and source is not None and source.name == "COMMANDLINE":
            raise UserError(f"{param.opts[0]} {reason}")


# --- Options ------------------------------------------------------------------------------------------------------


def argument(metavar: str, help: str, check: Callable[..., Any] | None = None) -> Any:
    """Return a positional argument of a command, for `Annotated`.

    `metavar` is its name in help texts; None for the parameter's name. `check` is called with the parsed value and
    returns the value for the command, or raises `UserError`; None for no check.
    """
    return typer.Argument(metavar=metavar, help=help, show_default=False, callback=check)


def option(metavar: str | None, help: str, *names: str, check: Callable[..., Any] | None = None) -> Any:
    """Return an option of a command; its name is made from the parameter's name unless `names` (`--out`) are given.

    `metavar` names the value in help texts; None for the type's name. `check` is called with the parsed value and
    returns the value for the command, or raises `UserError`; None for no check.
    """
    return typer.Option(*names, metavar=metavar, help=help, callback=check)


def number(help: str, least: int | None = 1, most: int = LARGEST, metavar: str | None = None) -> Any:
    """Return an option that takes a number from `least` to `most`, both included; None for no lower limit."""
    return typer.Option(metavar=metavar, help=help, min=least, max=most)


def choice(metavar: str, help: str, *names: str) -> Any:
    """Return an option that takes one of the values listed in its metavar, such as `a|b|c`."""
    return typer.Option(*names, metavar=metavar, help=help, callback=one_of)


def flag(name: str, help: str) -> Any:
    """Return an option without a value, and without a `--no-` form."""
    return typer.Option(name, help=help)


RunFile = Annotated[Path, argument("RUN.yaml", "The run file.")]
RunFolder = Annotated[Path, argument("RUN_DIR", "The folder of a run.", existing_run)]
Opens = Annotated[
    str,
    argument("RUN_DIR|MODEL", "A run folder, an exported adapter or checkpoint, a catalog name or a hub id."),
]
Overrides = Annotated[list[str] | None, option("KEY=VALUE", "Override a key of the run file; repeatable.", "--set")]
Card = Annotated[
    str | None,
    option(
        None,
        "A GPU such as l40s, or a size such as 44GiB. Default: hardware.gpu, else this machine's.",
        check=known_gpu,
    ),
]
Predict = Annotated[bool, flag("--predict", "Only predict the peak memory, and whether it fits.")]
OnCard = Annotated[
    str | None,
    option(None, "With --predict: the GPU, such as l40s, or 44GiB. Default: this machine's.", "--gpu", check=known_gpu),
]
Tight = Annotated[bool, flag("--tight", "Also what is expected to fit, but may run out of memory.")]
Routed = Annotated[
    str | None,
    option(
        "balanced|skew:S|worst|FILE", "How many tokens each expert receives. Default: balanced to published scores."
    ),
]
Tokens = Annotated[int | None, number("Tokens to train on: also estimate the hours.", most=2**60)]
Trainer = Annotated[
    str | None, choice("sft|dpo|kto|orpo|grpo", "Predict for a trainer of TRL instead of moetune's own.")
]
TrlSettings = Annotated[
    list[str] | None, option("KEY=VALUE", "With --trainer: an argument of its configuration; repeatable.", "--trl")
]
Scored = Annotated[int, number("Tokens to read from each data set.")]
FORMATS = "|".join(typing.get_args(QuantizedDtype))
KeepQuantized = Annotated[str | None, choice(FORMATS, "Quantize a model. A run is loaded as in training.", "--base")]
DataFormat = Annotated[
    str | None,
    choice(
        "|".join(typing.get_args(DataConfig.model_fields["format"].annotation)),
        "As data.format; by default the run's.",
        "--format",
    ),
]
NewFolder = Annotated[Path, option("DIR", "Output folder, new or empty.")]
Overwrite = Annotated[bool, flag("--overwrite", "Replace what moetune has written there.")]
Page = Annotated[Path | None, option("FILE", "Also write one self-contained HTML page.", check=output_file)]
Picture = Annotated[Path | None, option("FILE", "Also write a picture, .png or .svg.", check=picture)]
Json = Annotated[bool, flag("--json", "Print JSON for programs.")]


# --- Reading and answering ----------------------------------------------------------------------------------------


def read_run(path: Path | str, overrides: Sequence[str] | None) -> RunConfig:
    """Read a run file with `--set` overrides, and replace a memory budget for experts by a number (`within_memory`).

    Raises:
        UserError: the run file cannot be read or does not validate, or not one expert fits the budget.
    """
    return within_memory(load_run_config(path, overrides or ()))


def within_memory(config: RunConfig) -> RunConfig:
    """Replace a memory budget in `adapt:` by the largest number of experts of each layer that fits it.

    Progress is printed on stderr. A run file without a memory budget is returned unchanged.

    Raises:
        UserError: not one expert fits the budget, or the run cannot be predicted.
    """
    if not config.adapt.has_memory_budget:
        return config
    with heavy_imports():
        from moetune.routing.select import within_budget

    def tried(k: int, fits: bool) -> None:
        print(f"{counted(k, 'expert')} of each layer: {'fits' if fits else 'does not fit'}", file=sys.stderr)

    return within_budget(config, tried)


def at_hand(gpu: str | None, named: Sequence[str] = (), count: int = 1) -> Gpu | None:
    """Return the GPU of this machine and print it on stderr; None if there is none, or if the user named a GPU.

    Args:
        gpu: the value of `--gpu`.
        named: the GPUs that the run file names under `hardware:`.
        count: the number of GPUs of the run; the memory in the result is the least that is free on one of them.
    """
    if gpu is not None or named:
        return None
    from moetune.planning.at_hand import card_at_hand, in_words

    card = card_at_hand(count)
    if card is not None:
        note(f"{in_words(card)}; --gpu names another")
    return card


def target(gpu: str | None, hardware: HardwareConfig | None = None) -> tuple[DeviceType, str | Gpu | None]:
    """Return the device that `--predict` of a command predicts for: `cuda` with a GPU, or `cpu` with None.

    The GPU is that of `--gpu`, else of `hardware:`, else of this machine; without any, the device is this machine's
    CPU. Call it after the imports of the command: the memory that they take is measured here.
    """
    from moetune.memory.host import process_here

    process_here()
    named = None if hardware is None else hardware.gpu
    card = at_hand(gpu, () if named is None else (named,), 1 if hardware is None else hardware.count) or gpu or named
    return ("cpu" if card is None else "cuda"), card


def found_model(model: str, base: Any, device: DeviceType | None = None) -> Opened:
    """Find the model of a command without loading it, and print its notes.

    `model` is a run folder, the folder of a PEFT adapter or of a checkpoint, a catalog name or a hub id; `base` the
    format to quantize a checkpoint to, None to leave it as it is. Raises `UserError` for any other model, and for a
    `base` of a run or an adapter.
    """
    with heavy_imports():
        from moetune.inference.opened import find
    opened = find(model, base=base, device=device)
    note(*opened.notes, *filter(None, [opened.resolved.lost_bits]))
    return opened


def answer(as_json: bool, result: Mapping[str, Any], *shown: Any, verbose: bool = False, fails: bool = False) -> None:
    """Print the result of a command on stdout: with `as_json` the object `result` after `"schema": 1`, else `shown`.

    `shown` are views, sections, tables or text, for people; `verbose` adds the details of views. `fails` says that the
    answer is no: exit with code 1 (`typer.Exit`).
    """
    if as_json:
        print(json.dumps({"schema": 1, **result}, indent=2))
    else:
        from moetune.report.terminal import show

        for part in shown:
            show(part, terminal(), verbose=verbose)
    if fails:
        raise typer.Exit(1)


def answer_prediction(as_json: bool, report: MemoryReport) -> None:
    """Print the memory report of a command's `--predict`; exit with code 1 if it does not fit."""
    from moetune.report.memory import memory_view

    answer(as_json, report.to_json(), memory_view(report), fails=report.fits is False)


def trl_settings(trainer: str | None, settings: Sequence[str] | None) -> dict[str, Any]:
    """Return the `KEY=VALUE` strings of `--trl` as key -> value, parsed as YAML; `trainer` is the value of `--trainer`.

    Raises `UserError` for any other string, and for settings without a trainer.
    """
    from moetune.config.load import parse

    if settings and trainer is None:
        raise UserError("--trl is an argument of a trainer of TRL; add --trainer, such as --trainer dpo")
    arguments = {}
    for setting in settings or ():
        key, separator, value = setting.partition("=")
        if not separator or not key:
            raise UserError(f"--trl {shown(setting)}: give KEY=VALUE, such as beta=0.1")
        arguments[key] = parse(value, f"--trl {shown(setting)}: the value {shown(value)}")
    return arguments
