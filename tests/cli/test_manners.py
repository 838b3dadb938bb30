"""What costs nothing answers at once, and the program says what it is."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import moetune as package
from moetune.cli.main import _EXAMPLES
from moetune.errors import UserError
from moetune.files import Ledger
from moetune.memory.closed_form import store
from moetune.parallel.launch import number_in_environment
from tests import small


def test_version(moetune: Callable[..., Any]) -> None:
    assert moetune("--version").out == f"moetune {package.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "gone.yaml"], "run file 'gone.yaml' cannot be read"),
        (["train", "runn.yaml"], "No such file or directory. Did you mean 'run.yaml'?"),
        (["data", "gone.yaml"], "run file 'gone.yaml' cannot be read"),
        (["train", "run.yaml", "--set", "data.train=gone.jsonl"], "no such file: 'gone.jsonl'"),
        (["predict", "run.yaml", "--gpu", "l4os"], "l4os"),
        (["train", "run.yaml", "--set", "hardware.gpu=l4os"], "l4os"),
        (["train", "run.yaml"], "already holds a run"),
        (["report", "gone"], "run folder 'gone' does not exist"),
        (["eval", "tiny-mixtral", "--base", "nf3"], "--base 'nf3'"),
        (["eval", "tiny-mixtral", "--data", "gone.jsonl"], "no such file: 'gone.jsonl'"),
        (["export", "dune", "--format", "peft", "--out", "out"], "'dune' does not exist. Did you mean 'done'?"),
        (["export", "done", "--format", "peft", "--out", "done"], "is not empty"),
    ],
)
def test_cheap_checks_load_no_torch(arguments: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump(small.run_file(Path("gone"), Path("unicode-names"), Path("done")))
    )
    (tmp_path / "done" / "checkpoints").mkdir(parents=True)
    (tmp_path / "done" / "run.yaml").write_text("")
    Ledger(tmp_path / "done").add("run")
    code = (
        "import sys; from moetune.cli.main import main\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert done.stdout == "[]\n"


def test_every_command_has_an_example_that_is_its_own(moetune: Callable[..., Any]) -> None:
    for command, example in _EXAMPLES.items():
        name = command.__name__.rstrip("_")
        assert shlex.split(example)[:2] == ["moetune", name]
        said = moetune(name, "--help").out
        assert "Example: moetune" in said
        for option in shlex.split(example)[2:]:
            assert not option.startswith("--") or option in said


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ("models > /dev/full", 2, "No space left on device"),
        ("models >&-", 0, ""),
        ("models 2> /dev/full > /dev/full", 2, ""),
        ("models | exec true", 0, ""),
        ("count '\x1b[31m'", 2, "model '\\x1b[31m'"),
        ("count tiny-mixtral --set a=b", 2, "give one with --run"),
    ],
)
def test_stdout_that_takes_nothing_is_not_the_answer_no(shell: str, code: int, said: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f"PYTHONIOENCODING=ascii {sys.executable} -m moetune {shell}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "tiny-mixtral", "--prompt", "a", "--temperature", "1e-300"], "--temperature 1e-300"),
        (["generate", "tiny-mixtral", "--prompt", "a", "--seed", "1" * 23], "--seed"),
        (["generate", "tiny-mixtral", "--prompt", "a\udcff"], "is not UTF-8"),
        (["select", "scores.json", "--layers", "none"], "--layers none"),
        (["plan", "tiny-mixtral", "--gpu", "44GiB", "--data", "nosuch.jsonl"], "no such file: 'nosuch.jsonl'"),
    ],
)
def test_values_that_nothing_can_be_done_with(arguments: list[str], said: str, moetune: Callable[..., Any]) -> None:
    ended = moetune(*arguments)
    assert ended.code == 2
    assert said in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (FileNotFoundError(2, "gone", "x\x1b[31m"), 2, r"'x\x1b[31m': gone; moetune --debug says where"),
        (OSError(28, "No space left on device"), 2, "the system takes no more: No space left on device"),
        (EOFError("ended"), 70, "Traceback"),
        (OSError("can't allocate memory for a joke"), 70, "Traceback"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "the host has no more memory"),
        (ImportError("libx.so: failed to map segment from shared object"), 2, "the host has no more memory"),
        (BrokenPipeError(32, "Broken pipe"), 70, "Traceback"),
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


def test_control_characters_are_written_out(moetune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moetune.cli.main.__version__", "\x1b[31m1\r")
    assert moetune("--version").out == "moetune \\x1b[31m1\\r\n"


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "MASTER_PORT"])
def test_ranks_that_are_no_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "x")
    with pytest.raises(UserError, match=f"{name}='x' in the environment is no number; unset it"):
        number_in_environment(name)


def test_a_cache_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOETUNE_CACHE", "~nosuch/x")
    with pytest.raises(UserError, match="no user 'nosuch'"):
        store.folder()
