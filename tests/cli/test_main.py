"""What costs nothing answers at once, and the program says what it is."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import moetune as package
from moetune.cache import cache_folder
from moetune.cli.main import EXAMPLES
from moetune.errors import UserError
from moetune.files import Ledger
from moetune.parallel.start_ranks import number_in_environment
from tests import small

FOR_PEOPLE = {"chat"}
"""Commands that have nothing to say to programs."""


def test_version(moetune: Callable[..., Any]) -> None:
    assert moetune("--version").out == f"moetune {package.__version__}\n"


@pytest.mark.parametrize(("given", "policy"), [({}, "passive"), ({"GOMP_SPINCOUNT": "9"}, "None")])
def test_threads_that_wait_sleep(given: dict[str, str], policy: str) -> None:
    """It is set before torch is imported, and not beside a setting of one's own."""
    code = "import os, sys, moetune.cli.main; print(os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)"
    kept = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    ended = subprocess.run([sys.executable, "-c", code], env=kept | given, capture_output=True, text=True, check=True)
    assert ended.stdout == f"{policy} False\n"


CHEAP = {
    "train gone.yaml": "run file 'gone.yaml' cannot be read",
    "train runn.yaml": "No such file or directory. Did you mean 'run.yaml'?",
    "data gone.yaml": "run file 'gone.yaml' cannot be read",
    "train run.yaml --set data.train=gone.jsonl": "no such file: 'gone.jsonl'",
    "predict run.yaml --gpu l4os": "l4os",
    "train run.yaml --set hardware.gpu=l4os": "l4os",
    "train run.yaml": "already holds a run",
    "report gone": "run folder 'gone' does not exist",
    "eval tiny-mixtral --base nf3": "--base 'nf3'",
    "eval tiny-mixtral --data gone.jsonl": "no such file: 'gone.jsonl'",
    "export dune --format peft --out out": "'dune' does not exist. Did you mean 'done'?",
    "export done --format peft --out done": "is not empty",
}


def test_cheap_checks_load_no_torch(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump(small.run_file(Path("gone"), Path("unicode-names"), Path("done")))
    )
    (tmp_path / "done" / "checkpoints").mkdir(parents=True)
    (tmp_path / "done" / "run.yaml").write_text("")
    Ledger(tmp_path / "done").add("run")
    code = (
        "import functools, sys, typer.main; from moetune.cli.main import main\n"
        "typer.main.get_command = functools.cache(typer.main.get_command)\n"
        "for line in sys.argv[1:]:\n"
        "    sys.argv = ['moetune', *line.split()]\n"
        "    try: main()\n"
        "    except SystemExit as end: print(end.code, {'torch', 'transformers', 'datasets'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *CHEAP], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["2 set()"] * len(CHEAP), done.stderr
    for line, said in zip(done.stderr.splitlines(), CHEAP.values(), strict=True):
        assert said in line


def test_every_command_explains_itself_with_an_example_and_speaks_json(moetune: Callable[..., Any]) -> None:
    every = moetune("--help").out
    for name, example in EXAMPLES.items():
        program, named, *options = shlex.split(example)
        assert (program, named) == ("moetune", name)
        assert name in every
        said = moetune(name, "--help").out
        assert "Example: moetune" in said
        assert ("--json" in said) is (name not in FOR_PEOPLE)
        assert all(option in said for option in options if option.startswith("--"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ("models > /dev/full", 2, "No space left on device"),
        ("models >&-", 0, ""),
        ("models 2> /dev/full > /dev/full", 2, ""),
        ("models | exec true", 0, ""),
        ("init tiny-router --out é.yaml", 0, ""),
        pytest.param("init '\x1b[31m'", 2, "recipe '\\x1b[31m'", marks=pytest.mark.full),  # looks for a model too
    ],
)
def test_stdout_that_takes_nothing_is_not_the_answer_no(shell: str, code: int, said: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", f"env -u PYTHONUNBUFFERED PYTHONIOENCODING=ascii {sys.executable} -m moetune {shell}"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (FileNotFoundError(2, "gone", "x\x1b[31m"), 2, r"'x\x1b[31m': gone; moetune --debug shows where"),
        (OSError(28, "No space left on device"), 2, "error: No space left on device"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), 1, "error: the GPU has no more memory for this command"),
        (MemoryError(), 2, "the host has no more memory for this process; free some, or raise its limit (ulimit -v)"),
        (EOFError("ended"), 70, "Traceback"),
        (RecursionError("maximum recursion depth exceeded"), 70, "Traceback"),
        (OSError("can't allocate memory for a joke"), 70, "Traceback"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "the host has no more memory"),
        (ImportError("libx.so: failed to map segment from shared object"), 2, "the host has no more memory"),
        (OSError("libx.so: failed to map segment from shared object"), 2, "the host has no more memory"),
    ],
)
def test_only_what_the_system_says_is_a_message(
    error: Exception, code: int, said: str, moetune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("moetune.models.catalog.model_names", fail)
    ended = moetune("models")
    assert ended.code == code, ended.err
    assert said in ended.err


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_limit_of_memory_is_a_message() -> None:
    """As `ulimit -v` sets it, 16 MiB above what is taken before the command begins: too little for torch."""
    code = (
        "import resource, sys; from moetune.cli.main import main\n"
        "taken = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (taken + (16 << 20),) * 2)\n"
        "sys.argv = ['moetune', 'count', 'tiny-mixtral']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = "error: the host has no more memory for this process; free some, or raise its limit (ulimit -v)"
    assert (done.returncode, done.stdout, said in done.stderr) == (2, "", True), done.stderr
    assert "Traceback" not in done.stderr


def test_control_characters_are_written_out(moetune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On both streams, whoever prints; a progress bar of another library may go back, and no more."""
    monkeypatch.setattr("moetune.cli.main.__version__", "\x1b[31m1\r")
    assert moetune("--version").out == "moetune \\x1b[31m1\\r\n"

    def printing() -> list[str]:
        print("\rbar\x1b[A \x1b]0;title\x07\x1b[31m", file=sys.stderr)
        return []

    monkeypatch.setattr("moetune.models.catalog.model_names", printing)
    assert moetune("models").err == "\rbar\x1b[A \\x1b]0;title\\x07\\x1b[31m\n"


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "MASTER_PORT"])
def test_ranks_that_are_no_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "x")
    with pytest.raises(UserError, match=f"{name}='x' in the environment is no number; unset it"):
        number_in_environment(name)


def test_a_cache_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOETUNE_CACHE", "~nosuch/x")
    with pytest.raises(UserError, match="no user 'nosuch'"):
        cache_folder("reports")
