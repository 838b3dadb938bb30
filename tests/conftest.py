"""Settings and fixtures of all tests: one thread, no network, a small model on disk, no GPU unless a test is marked."""

import atexit
import functools
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

gc.disable()  # until modules are imported and tests collected: pytest_collection_finish

os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start: the order of sums depends on it
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # nothing is compiled; bitsandbytes would load the compiler to mark functions
os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
if "MOETUNE_CACHE" not in os.environ:  # reports that one test traces serve all others, in every worker
    os.environ["MOETUNE_CACHE"] = tempfile.mkdtemp(prefix="moetune-tests-")
    atexit.register(shutil.rmtree, os.environ["MOETUNE_CACHE"], ignore_errors=True)

import pytest
import typer.main
from hypothesis import HealthCheck, settings

from moetune.cli import main
from moetune.config.schema import RunConfig
from tests.processes import start_server

# torch and transformers are imported where they are used: xdist's controller, which runs no test, goes without
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it; tests send it
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every case, where a sample is enough for a push")


def pytest_configure(config: pytest.Config) -> None:
    """Configure Hypothesis: the same examples in each run, 5 for a test on a push, 100 with `--all`."""
    draws = 100 if config.getoption("--all") else 5
    shared = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    settings.register_profile(
        "ours", max_examples=draws, derandomize=True, deadline=None, database=None, suppress_health_check=shared
    )
    settings.load_profile("ours")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--all`, keep the tests of a push only; skip tests that need a device which is not there."""
    if not config.getoption("--all"):
        kept = on_a_push(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    import torch

    from tests.nullcuda import device

    torch.set_num_threads(1)
    on_null_device, on_cuda = device.is_present(), torch.cuda.is_available()
    for item in items:
        if (gpu := item.get_closest_marker("gpu")) and not on_cuda:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        elif gpu and on_null_device and gpu.kwargs.get("values", True):
            item.add_marker(pytest.mark.skip(reason="needs values, which the null device has not"))
        elif item.get_closest_marker("nullcuda") and not on_null_device:
            item.add_marker(pytest.mark.skip(reason="no null device: scripts/test_cuda.sh"))


def on_a_push(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that run on a push: those without the mark `full`, and every n-th case of a test marked
    `one_in(n)`, the same ones each time.

    The first such case is chosen by the test's name, so that a parameter value left out of one test is in another.
    """
    kept, sampled = set(), defaultdict(list)
    for item in items:
        if item.get_closest_marker("one_in"):
            sampled[item.nodeid.partition("[")[0]].append(item)
        elif not item.get_closest_marker("full"):
            kept.add(item)
    for name, cases in sampled.items():
        cases = [case for case in cases if not case.get_closest_marker("full")]
        if cases:
            every = cases[0].get_closest_marker("one_in").args[0]
            kept.update(cases[zlib.crc32(name.encode()) % min(every, len(cases)) :: every])
    return kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape lone surrogates in captured output, which damaged files cause: xdist's workers could not send them."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


def pytest_collection_finish() -> None:
    """Freeze the objects that exist after collection, so that no garbage collection searches them again.

    Training starts some collections, each of which would take longer than three steps of a small model. What is
    garbage by now is a hundredth of that, less than it is worth to look for.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # rarely: most tests end before their garbage is worth a collection
    gc.enable()


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The imported script of scripts/bench that the test module names in `BENCH`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(request.path.parents[1] / "scripts/bench")
        yield importlib.import_module(request.module.BENCH)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Function: model type -> folder with the checkpoint of its toy model (toys.py) of two layers, written once."""
    from tests.exporting.runs import write_base

    return functools.cache(lambda name: write_base(tmp_path_factory.mktemp("base") / name, name, num_hidden_layers=2))


@pytest.fixture(scope="module", autouse=True)
def what_stays() -> Iterator[None]:
    """After each test module, freeze what it leaves behind, mostly in caches, as `pytest_collection_finish` does."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def a_server_of_processes() -> None:
    """Processes of tests are forked from what is imported before the first of them."""
    start_server()


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    """Files that are flushed are left to the system: a process that is killed loses nothing of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def a_configuration_runs_once() -> Iterator[None]:
    """A model whose configuration ran without values in one test is not run so in another (models/dry_run.py)."""
    from moetune.adapt import count
    from moetune.models.dry_run import dry_run
    from moetune.run import resolve

    is_looped: dict[str, bool] = {}

    def once(plain: Any) -> bool:
        settings = plain.config.to_json_string(use_diff=False)
        if settings not in is_looped:
            is_looped[settings] = dry_run(plain)
        return is_looped[settings]

    with pytest.MonkeyPatch.context() as patch:
        for module in (count, resolve):
            patch.setattr(module, "dry_run", once)
        yield


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the checkpoint of the small Mixtral of `tests/small.py`."""
    from tests import small

    return small.write_model(tmp_path_factory.mktemp("models") / "small-mixtral")


@pytest.fixture(scope="session")
def noisy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `small_model`, with dropout and router jitter, so that training draws random numbers at every step."""
    from tests import small

    folder = tmp_path_factory.mktemp("models") / "noisy-mixtral"
    return small.write_model(folder, attention_dropout=0.1, router_jitter_noise=0.05)


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JSONL file with fourteen prompts and completions of different lengths."""
    from tests import small

    return small.write_data(tmp_path_factory.mktemp("data") / "prompts.jsonl")


@pytest.fixture
def configure(small_model: Path, small_data: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """Function: configuration of a run of the small model, as `small.run_config` gives it, into `tmp_path / output`."""
    from tests import small

    def config(adapt: str = "router", /, output: str = "run", **sections: Any) -> RunConfig:
        return small.run_config(small_model, small_data, tmp_path / output, adapt, **sections)

    return config


@pytest.fixture
def unpredicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on runs do not predict their memory, which takes longer than their steps (tests/watch is of that)."""
    from moetune.watch import memory_record

    monkeypatch.setattr(memory_record, "predicted", lambda *_: memory_record.Predicted())


_built = functools.cache(typer.main.get_command)
"""Typer's function that builds the commands, cached: building takes as long as running many a command."""


@dataclass(frozen=True)
class Ended:
    """The result of a command: exit code, stdout and stderr."""

    code: int
    out: str
    err: str


@pytest.fixture
def moetune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Function that runs a command in this process: `moetune("train", "run.yaml")`."""

    monkeypatch.setattr("typer.main.get_command", _built)

    def run(*arguments: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["moetune", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main.main()
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return run
