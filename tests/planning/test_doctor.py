"""`moetune doctor`: what would make a run fail is a problem, with its remedy, and exit code 1."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moetune.adapt.guard.comparison import Verdict
from moetune.models.catalog.gpus import Figure
from moetune.planning import doctor

Run = Callable[..., Any]


def outcomes(ended: Any) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(ended.out)["checks"]}


@pytest.mark.skipif(bool(torch.version.cuda) and not torch.cuda.is_available(), reason="a torch for CUDA finds no GPU")
def test_a_machine_that_is_well(moetune: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ["numpy>=2", "none; extra == 'dev'"])
    ended = moetune("doctor", "--json")
    assert ended.code == 0
    found = outcomes(ended)
    assert found["numpy"]["outcome"] == "ok"
    assert "none" not in found
    assert found["bitsandbytes' library"]["outcome"] == "ok"
    assert "a run can start" in moetune("doctor").out


def test_packages_and_a_card_that_are_not_there(moetune: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ["numpy<1", "no-such-package>=3"])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ended = moetune("doctor", "--json")
    assert ended.code == 1
    checks = outcomes(ended)
    assert (checks["numpy"]["outcome"], checks["numpy"]["remedy"]) == ("problem", "pip install 'numpy<1'")
    assert checks["no-such-package"]["found"] == "not installed"
    assert checks["CUDA"]["found"] == "torch is built for CUDA 13.0 and finds no GPU"


def test_a_kernel_that_differs_is_no_problem(moetune: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run works without it, so it is a note, and exit code 0."""

    def cuda() -> Iterator[doctor.Check]:
        yield doctor._kernels(torch.device("cuda", 0), (), "kernels")

    monkeypatch.setattr(doctor, "_cuda", cuda)
    for verdict, said in (({"gated": "differs by 3"}, "gated differs by 3"), ({}, "not compared: no memory")):
        stopped = "" if verdict else "no memory"
        monkeypatch.setattr(doctor, "compared", lambda *_, of=(verdict, stopped): Verdict(*of))
        ended = moetune("doctor", "--json")
        assert ended.code == 0
        assert json.loads(ended.out)["is_well"]
        assert outcomes(ended)["kernels"].items() >= {"outcome": "note", "found": said}.items()


@pytest.mark.full
@pytest.mark.slow
def test_a_run_that_needs_more_than_there_is(
    moetune: Run, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(f"model: {{path: {small_model}}}\nadapt: {{router: all}}\ntrain: {{sequence_length: 64}}\n")
    monkeypatch.setattr(doctor, "this_device", lambda: "cpu")
    assert outcomes(moetune("doctor", run, "--json"))["host memory of the run"]["outcome"] == "ok"
    monkeypatch.setattr(doctor, "this_machine", lambda: Figure(1000, "there"))
    ended = moetune("doctor", run, "--json")
    assert ended.code == 1
    assert outcomes(ended)["host memory of the run"]["outcome"] == "problem"
    ended = moetune("doctor", run, "--set", "adapt.router=9", "--json")
    assert "layer 9" in outcomes(ended)["run file"]["found"]
