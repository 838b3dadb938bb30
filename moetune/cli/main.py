"""Entry point: register the commands, turn exceptions into messages and exit codes."""

import contextlib
import os
import sys
import traceback
from importlib import import_module
from typing import Annotated

# Threads that wait for work sleep. Those that spin slow each other down several times over on a busy machine.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
    os.environ["OMP_WAIT_POLICY"] = "passive"
# torch reads these when it is imported. Growing segments keep fragmentation low at no cost.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("TORCH_CUBLAS_WORKSPACE_CACHE", "1")  # torch 2.15 would allocate them anew for each product
# Nothing here is compiled by torch, and bitsandbytes would load its compiler, which takes longer than a prediction.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import typer

from moetune import __version__
from moetune.cli.adapter import adapter
from moetune.compat.glibc import give_back_memory
from moetune.errors import DoesNotFit, UserError, one_line, printable, shown
from moetune.report.console import quieten

_debug = False  # whether --debug was given
_INTERNAL = 70  # EX_SOFTWARE of sysexits.h
_OF_MEMORY: dict[type, tuple[str, ...]] = {
    RuntimeError: ("DefaultCPUAllocator",),  # the message of torch's CPU allocator
    **dict.fromkeys((ImportError, OSError), ("failed to map segment",)),  # a library for which no memory is left
}
"""Exception type -> texts in its message, each of which means that the host has no memory left."""


def _show_version(asked: bool) -> None:
    """Print the version and exit, if `--version` was given."""
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
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback with errors. Give before COMMAND.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Set the options that come before a command."""
    global _debug
    _debug = debug


EXAMPLES = {
    "count": "moetune count mixtral-8x7b",
    "plan": "moetune plan mixtral-8x7b --gpu 44GiB --goal lora",
    "score": "moetune score run.yaml --out scores.json",
    "select": "moetune select scores.json --budget 0.1",
    "predict": "moetune predict run.yaml --gpu 44GiB",
    "compare": "moetune compare run.yaml",
    "verify": "moetune verify run.yaml --steps 2",
    "data": "moetune data run.yaml --html data.html",
    "train": "moetune train run.yaml --set train.epochs=3",
    "report": "moetune report runs/first --watch 30",
    "eval": "moetune eval runs/first --data heldout.jsonl",
    "drift": "moetune drift runs/first",
    "generate": 'moetune generate runs/first --prompt "Once upon a time"',
    "chat": "moetune chat runs/first",
    "export": "moetune export runs/first --format merged --out out/merged --check 8",
    "serve": "moetune serve out/adapter --with vllm --gpu l40s",
    "apply": "moetune apply out/delta --to mixtral-8x7b --out out/applied",
    "quantize": "moetune quantize mixtral-8x7b --out models/mixtral-nf4",
    "models": "moetune models",
    "init": "moetune init mixtral-8x7b-lora --out run.yaml",
    "doctor": "moetune doctor",
}
"""Name of a command, as of its module in this package and its function there -> an example, shown with its help."""
_ELSEWHERE = {"chat": "generate.chat", "eval": "eval.eval_"}
for name, example in EXAMPLES.items():
    module, _, function = _ELSEWHERE.get(name, f"{name}.{name}").partition(".")
    app.command(name, epilog=f"Example: {example}")(getattr(import_module(f"moetune.cli.{module}"), function))
app.add_typer(adapter, name="adapter")


def main() -> None:
    """Run the command in `sys.argv` and exit the process.

    Exit codes: 0: done; 1: the command ran and its answer is no, or the GPU's memory ran out; 2: bad input, or the
    system lacks host memory, disk space or another resource; 70: an internal error of moetune; 130: interrupted.
    """
    code = _run()
    try:
        sys.stdout.flush()
    except UserError as error:
        _discard(1)
        code = _failed(error) if code in (0, 1) else code
    try:
        sys.stderr.flush()
    except OSError:
        _discard(2)
    sys.exit(code)


def _discard(descriptor: int) -> None:
    """Discard what Python writes to a standard stream at exit; failing there would make the exit code 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _run() -> int:
    """Run the command, print the message of an exception, and return the exit code."""
    try:
        quieten()
        give_back_memory()
        app()
    except SystemExit as ended:
        cause = ended.__context__ and (ended.__context__.__cause__ or ended.__context__)
        if isinstance(cause, OSError | EOFError):  # typer turns some of them into exit code 1
            return _failed(cause)
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 2
    except DoesNotFit as error:
        _say(f"error: {error}", str(error))
        return 1
    except Exception as error:
        return _failed(error)
    return 0


def _failed(error: BaseException) -> int:
    """Print the exception that ended the command; return its exit code: 1 if the GPU's memory ran out, 2 for bad input,
    70 for an internal error."""
    system = error if isinstance(error, UserError) else _of_system(error)
    trace = printable("".join(traceback.format_exception(error))) if _debug or system is None else ""
    if system is None:
        _say(trace.rstrip(), trace)
        return _INTERNAL
    _say(f"{trace}error: {system}", str(system))
    return 1 if _is_of_gpu(error) else 2


def _say(text: str, message: str) -> None:
    """Print `text` on stderr; or, on a rank whose launcher prints the ranks' errors, pass `message` to the launcher."""
    with contextlib.suppress(OSError):  # if stderr cannot be written, the exit code must do
        if not _note_failure(message):
            print(text, file=sys.stderr, flush=True)


def _is_of_gpu(error: BaseException) -> bool:
    """Return whether an exception is `torch.OutOfMemoryError`: a GPU has no memory left. torch is not imported."""
    return any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)


def _of_system(error: BaseException) -> UserError | None:
    """Return a `UserError` for an exception that the system or the user's input caused; None for an internal error.

    Such exceptions are: no memory left, of the host or of a GPU; text that is not UTF-8; and errors of files and disks.
    Input that is nested too deeply is refused by its reader; a `RecursionError` that arrives here is an internal error.
    """
    if _is_of_gpu(error):
        reason = (
            "the GPU has no more memory for this command; take a smaller batch or shorter sequences (--predict, where "
            f"the command has it, shows what it needs): {one_line(error)}"
        )
    elif isinstance(error, MemoryError) or any(name in str(error) for name in _OF_MEMORY.get(type(error), ())):
        reason = "the host has no more memory for this process; free some, or raise its limit (ulimit -v)"
    elif isinstance(error, UnicodeError):
        reason = f"a text is not UTF-8: {one_line(error)}"
    elif isinstance(error, OSError) and error.errno is not None:
        file = "" if error.filename is None else f"{shown(str(error.filename), 300)}: "
        reason = f"{file}{one_line(error)}"
    else:
        return None
    return UserError(f"{reason}; moetune --debug shows where")


def _note_failure(message: str) -> bool:
    """Write the message to the file that the launcher of several ranks reads; return whether the launcher prints it.

    Without a launcher, write nothing and return False.
    """
    if "WORLD_SIZE" not in os.environ and "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return False
    from moetune.parallel.start_ranks import is_quiet, note_failure

    note_failure(message)
    return is_quiet()
