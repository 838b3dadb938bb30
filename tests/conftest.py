"""What every test may count on: one thread, no network, a small model on disk, no GPU needed unless a test says so."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

gc.disable()  # until all is imported and collected

os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start: sums depend on it
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # nothing is compiled; bitsandbytes would load the compiler to mark functions
os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported

import pytest
import torch

from moetune.cli import main
from tests import small

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays: each full collection, and training asks for some, would look at all
    of it again, which takes longer than three steps of a small model."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `tests/small.py`, in a folder."""
    return small.write_model(tmp_path_factory.mktemp("models") / "small-mixtral")


@pytest.fixture(scope="session")
def noisy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with dropout and router jitter, so that training draws random numbers at every step."""
    folder = tmp_path_factory.mktemp("models") / "noisy-mixtral"
    return small.write_model(folder, attention_dropout=0.1, router_jitter_noise=0.05)


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fourteen prompts and completions of unlike lengths, JSONL."""
    return small.write_data(tmp_path_factory.mktemp("data") / "prompts.jsonl")


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str


@pytest.fixture
def moetune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Runs the program in this process: `moetune("train", "run.yaml")`."""

    def run(*arguments: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["moetune", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.main()
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return run
