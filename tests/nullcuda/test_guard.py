"""A kernel that does not work on this machine: the run trains to its end without it and says so, before and after."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml

from moetune.adapt.guard import check, comparison
from moetune.adapt.guard.check import Failures
from moetune.cache import read_cached
from moetune.config.load import load_run_config
from moetune.config.schema import QuantizedDtype
from moetune.inference import evaluate
from moetune.kernels.registry import OPERATORS, use_kernels, without_kernel
from moetune.planning import settle
from moetune.report.console import terminal
from moetune.routing.recorder import Recorder
from moetune.routing.score import load_base, record_batch, to_score
from moetune.run.resolve import resolve
from moetune.run.resolved import ResolvedRun
from moetune.training.step.batch import random_rows
from moetune.watch import train as watch_train
from tests import small
from tests.conftest import Ended
from tests.nullcuda import device, runs
from tests.nullcuda.test_commands import start

Run = Callable[..., Ended]
COMPARED = check.compared
CHILD = """
import sys
from moetune.adapt.exercise import compare_here
from tests.nullcuda import device
with device.answering(compares=True):
    compare_here(int(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What is found on this machine is kept in a folder of the test's own."""
    monkeypatch.setattr(check, "compared", COMPARED)
    monkeypatch.setattr(comparison, "_CHILD", CHILD)
    monkeypatch.setenv("MOETUNE_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    use_kernels(but=())


@pytest.fixture
def run_file(small_model: Path, small_data: Path, tmp_path: Path) -> Path:
    """Two steps of LoRA on everything, with as many kept rows as fit."""
    run = small.run_file(
        small_model,
        small_data,
        tmp_path / "run",
        "lora",
        model={"dtype": "bf16"},
        train={"steps": 2, "save_every": 2, "keep_rows": "auto"},
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    return tmp_path / "run.yaml"


def failed_in(file: Path) -> set[str]:
    """The operators that a file of the guard names, at whatever sizes."""
    known: Failures | None = read_cached(file, Failures)
    assert known is not None
    return {name for failed in known.values() for name in failed}


def trained_without(run_file: Path) -> list[str]:
    """The operators without kernel that the run folder names; the run has taken its steps."""
    folder = run_file.parent / "run"
    assert [line["step"] for line in small.read_metrics(folder) if "loss" in line][-1] == 2
    names: list[str] = yaml.safe_load((folder / "run.yaml").read_text())["hardware"]["without_kernels"]
    return names


@pytest.mark.parametrize(
    ("fault", "kernel", "operator", "said"),
    [
        ("NULL_REFUSES", "_gated_backward", "gated_backward_", "cannot be compiled or launched"),
        ("NULL_LIES", "_gated", "gated", "differs from torch's operations by 3"),
        pytest.param("NULL_HANGS", "_low_rank", "low_rank", "did not finish within 60 sec", marks=pytest.mark.full),
    ],
)
def test_a_run_without_a_kernel(
    fault: str,
    kernel: str,
    operator: str,
    said: str,
    moetune: Run,
    run_file: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparison, "LIMIT", 60.0)
    monkeypatch.setenv(fault, kernel)
    settled = list[tuple[str, ...]]()

    def settled_on(run: ResolvedRun, card: torch.device, before: None) -> ResolvedRun:
        settled.append(run.config.hardware.without_kernels)
        return settle.settled_on(run, card, before)

    monkeypatch.setattr(watch_train, "settled_on", settled_on)
    trained = moetune("train", run_file)
    assert trained.code == 0, trained.err
    assert settled == [(operator,)]  # the rows that fit are those of a run without the kernel
    assert f"the kernel of {operator} {said}" in " ".join(trained.err.split())
    assert trained_without(run_file) == [operator], trained.err
    (verdict,) = cache.glob("kernels-*.json.gz")
    assert failed_in(verdict) == {operator}

    notes = json.loads(moetune("predict", run_file, "--gpu", "l40s", "--json").out)["notes"]
    assert [operator in note for note in notes] == [True]
    assert json.loads(moetune("predict", run_file, "--gpu", "h100", "--json").out)["notes"] == []

    monkeypatch.delenv(fault)  # the kernel works now, and nothing is compared again
    again = moetune("train", run_file, "--overwrite")
    assert operator in again.err
    assert "comparing" not in again.err
    assert trained_without(run_file) == [operator]
    if fault == "NULL_LIES":
        verdict.write_text("damaged")
        again = moetune("train", run_file, "--overwrite")
        assert "comparing" in again.err
        assert trained_without(run_file) == []
    if fault == "NULL_REFUSES":
        found = {check["name"]: check for check in json.loads(moetune("doctor", run_file, "--json").out)["checks"]}
        assert found["kernels at the sizes of the run"]["outcome"] == "ok"  # the doctor compares again
        assert failed_in(verdict) == set()
        monkeypatch.setenv(fault, kernel)  # it fails only when training comes to it
        with pytest.warns(UserWarning, match=f"the kernel of {operator} {said}"):
            again = moetune("train", run_file, "--overwrite")
        assert trained_without(run_file) == [operator]
        assert failed_in(verdict) == {operator}


@pytest.fixture
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of predicted tokens, which the device does not know."""
    held_out_loss = evaluate.held_out_loss

    def counted(model: Any, batch: Any) -> Any:
        return held_out_loss(model, batch)[0], torch.ones(())

    monkeypatch.setattr(evaluate, "held_out_loss", counted)


@pytest.mark.usefixtures("_counted")
def test_other_commands_compare_too(
    moetune: Run, run_file: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for all of them: they have the run's sizes. What they find, a plan for this card knows, at any sizes."""
    monkeypatch.setenv("NULL_LIES", "_gated")
    found = "the kernel of gated differs"
    to_be_scored = resolve(to_score(load_run_config(run_file)), "cuda")
    with pytest.warns(UserWarning, match="comparing the kernels") as first:  # of `score` and `drift`
        adapted, _ = load_base(to_be_scored, torch.device("cuda", 0), terminal(stderr=True))
    assert any(found in str(one.message) for one in first)
    assert without_kernel().keys() == {"gated"}
    launched = device.asked().launches
    rows = random_rows(2, 16, 100, packing=False)
    record_batch(Recorder(adapted), adapted, rows, 0, 0, 0)
    assert device.asked().launches > launched
    use_kernels(but=())
    assert moetune("train", run_file).code == 0
    use_kernels(but=())
    with pytest.warns(UserWarning, match=found) as second:  # of `eval`, `generate` and `chat`
        ended = moetune("eval", run_file.parent / "run", "--data", small_data)
    assert ended.code == 0, ended.err
    assert without_kernel().keys() == {"gated"}
    assert not any("comparing" in str(one.message) for one in second)
    model = yaml.safe_load(run_file.read_text())["model"]["path"]
    for card, is_known in (("l40s", True), ("h100", False)):
        planned = json.loads(moetune("plan", model, "--gpu", card, "--goal", "router", "--json").out)
        assert [note for note in planned["notes"] if "gated" in note] == [
            "the kernel of gated is not used: torch's operations run in its place (hardware.without_kernels)"
        ] * is_known, planned["notes"]


@pytest.mark.full
def test_a_compiler_that_fails_leaves_torchs_operations(run_file: Path, tmp_path: Path) -> None:
    """The doctor says so, and a run trains to its end."""
    triton = pytest.importorskip("triton")
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    broken = tmp_path / "ptxas"
    broken.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {ptxas} --version\necho no such target >&2; exit 1\n')
    broken.chmod(0o755)
    environment = {"TRITON_PTXAS_PATH": str(broken), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    doctor = start("doctor", "--json", **environment)
    out, err = doctor.communicate()
    found = {check["name"]: check for check in json.loads(out)["checks"]}["kernels of the experts"]
    assert found["outcome"] == "note", err
    assert all(operator in found["found"] for operator in OPERATORS)
    train = start("train", run_file, **environment)
    _, err = train.communicate()
    assert train.returncode == 0, err
    assert {"gated", "low_rank", "dequantize_nf4"} <= set(trained_without(run_file))


@pytest.mark.parametrize("operator", sorted(OPERATORS))
def test_what_runs_without_a_kernel_is_predicted(operator: str, toy_model: Path) -> None:
    storage = operator.removeprefix("dequantize_")
    model = {"base": storage if storage in get_args(QuantizedDtype) else "nf4"}
    config = runs.toy_run(toy_model, "lora", model=model, hardware={"without_kernels": [operator]})
    compared = runs.compare(config)
    assert abs(compared.off) <= 0.001 * compared.measured, compared
