"""`moetune`: one command a file. This module wires them up, and turns errors into messages and exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
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
_INTERNAL = 70  # EX_SOFTWARE of sysexits.h


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
    """Runs a command. Exit code 0: done; 1: it ran and the answer is no; 2: bad input, or the system has not what it
    takes; 70: an error of moetune itself; 130: interrupted."""
    code = _run()
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python has still to write at its end
        code = code if code == _INTERNAL else _fail(UserError(f"stdout cannot be written: {one_line(error)}"))
    sys.exit(code)


def _run() -> int:
    """Runs the command, writes the message of an error, and returns the exit code."""
    try:
        quieten()
        app()
    except SystemExit as ended:
        if isinstance(ended.__context__, OSError):  # typer's answer to a pipe that nobody reads
            return _fail(UserError(f"stdout cannot be written: {one_line(ended.__context__)}"))
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 2
    except DoesNotFit as error:
        _say(str(error))
        return 1
    except Exception as error:
        if (bad := _bad_input(error)) is not None:
            return _fail(bad)
        _note_failure(traceback.format_exc())
        traceback.print_exc()
        return _INTERNAL
    return 0


def _fail(error: UserError) -> int:
    if _debug:
        traceback.print_exc()
    _say(str(error))
    return 2


def _say(message: str) -> None:
    if not _note_failure(message):
        print(f"error: {message}", file=sys.stderr)


def _bad_input(error: BaseException) -> UserError | None:
    """The error, or what the system lacks or has against a file; None for an error of ours."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch's is a RuntimeError
        return UserError("the host has no more memory for this process; free some, or raise its limit (ulimit -v)")
    if isinstance(error, RecursionError):
        return UserError("what was given is nested too deeply")
    if isinstance(error, UnicodeError):
        return UserError(f"a text is not UTF-8: {one_line(error)}")
    if isinstance(error, OSError):
        file = "stdout or another stream: " if error.filename is None else f"{shown(str(error.filename), 300)}: "
        return UserError(f"{file}{one_line(error)}")
    return None


def _note_failure(message: str) -> bool:
    """On a rank of several, leaves the message where what started them looks; whether that will show it."""
    if "WORLD_SIZE" not in os.environ and "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return False
    from moetune.parallel.launch import is_quiet, note_failure

    note_failure(message)
    return is_quiet()
