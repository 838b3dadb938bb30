"""`moetune`: one command a file. This module wires them up and turns a `UserError` into a message and exit code 2."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

# torch reads this when it is imported: growing segments keep fragmentation low at no cost.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import typer

from moetune import __version__
from moetune.cli.apply import apply
from moetune.cli.compare import compare
from moetune.cli.count import count
from moetune.cli.data import data
from moetune.cli.doctor import doctor
from moetune.cli.drift import drift
from moetune.cli.eval import eval_
from moetune.cli.export import export
from moetune.cli.generate import chat, generate
from moetune.cli.init import init
from moetune.cli.models import models
from moetune.cli.plan import plan
from moetune.cli.predict import predict
from moetune.cli.quantize import quantize
from moetune.cli.report import report
from moetune.cli.score import score
from moetune.cli.select import select
from moetune.cli.train import train
from moetune.cli.verify import verify
from moetune.errors import DoesNotFit, UserError, one_line, shown
from moetune.report.console import quieten

_debug = False  # as the last command was told


def _show_version(asked: bool) -> None:
    if asked:
        print(f"moetune {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="moetune",
    help="Fine-tune a mixture-of-experts model on one GPU, and know before starting that it fits.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Before a command: say where bad input was noticed.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    global _debug
    _debug = debug


_EXAMPLES: dict[Callable[..., None], str] = {
    count: "moetune count mixtral-8x7b",
    plan: "moetune plan mixtral-8x7b --gpu 44GiB --goal lora",
    score: "moetune score run.yaml --out scores.json",
    select: "moetune select scores.json --budget 0.1",
    predict: "moetune predict run.yaml --gpu 44GiB --method formula",
    compare: "moetune compare run.yaml",
    verify: "moetune verify run.yaml --steps 2",
    data: "moetune data run.yaml --html data.html",
    train: "moetune train run.yaml --set train.epochs=3",
    report: "moetune report runs/first --watch 30",
    eval_: "moetune eval runs/first --data heldout.jsonl",
    drift: "moetune drift runs/first",
    generate: 'moetune generate runs/first --prompt "Once upon a time"',
    chat: "moetune chat runs/first",
    export: "moetune export runs/first --format merged --out out/merged --check 8",
    apply: "moetune apply out/delta --to mixtral-8x7b --out out/applied",
    quantize: "moetune quantize mixtral-8x7b --out models/mixtral-nf4",
    models: "moetune models",
    init: "moetune init mixtral-8x7b-lora --out run.yaml",
    doctor: "moetune doctor",
}
for command, example in _EXAMPLES.items():
    app.command(name=command.__name__.rstrip("_"), epilog=f"Example: {example}")(command)


def main() -> None:
    """Runs a command. Exit code 0: done; 1: it ran and the answer is no; 2: bad input; 130: interrupted."""
    quieten()
    try:
        app()
    except DoesNotFit as error:
        if not _note_failure(str(error)):
            print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        bad = _bad_input(error)
        if bad is None:
            _note_failure(traceback.format_exc())
            raise
        if _debug:
            traceback.print_exc()
        if not _note_failure(str(bad)):
            print(f"error: {bad}", file=sys.stderr)
        sys.exit(2)


def _bad_input(error: Exception) -> UserError | None:
    """The error, or what the system has against a file that the command line names; None for an error of ours."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError) and isinstance(error.filename, str | Path):
        given = {Path(name) for argument in sys.argv[1:] for name in (argument, argument.partition("=")[2]) if name}
        if not given.isdisjoint((file := Path(error.filename), *file.parents)):
            return UserError(f"{shown(str(file))}: {one_line(error)}")
    return None


def _note_failure(message: str) -> bool:
    """On a rank of several, leaves the message where what started them looks; whether that will show it."""
    if "WORLD_SIZE" not in os.environ and "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return False
    from moetune.parallel.launch import is_quiet, note_failure

    note_failure(message)
    return is_quiet()
