"""The benchmark of predicted against measured memory, without a GPU; and gpu.sh, which runs all benchmarks that need
one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from moetune.config.schema import RunConfig
from moetune.memory.assumed_routing import BALANCED
from moetune.memory.measurement.measure import Measured

FOLDER = Path(__file__).parents[1] / "scripts/bench"
BENCH = "predict_vs_measured"
ROW: dict[str, Any] = {
    "case": "some",
    "fits": True,
    "predicted": {"allocated": 2**30, "reserved": 2**31, "process": 3 * 2**30},
    "measured": {"allocated": 2**30, "reserved": 2**32, "process": 5 * 2**30},
}
FULL: dict[str, Any] = ROW | {"measured": None, "out_of_memory": {"loading": False, "message": ""}}


def test_an_unknown_case_is_refused(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["predict_vs_measured.py", "--cases", "mixtrla"])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2
    assert "unknown: mixtrla; there are mixtral-8x7b-lora, " in capsys.readouterr().err


def claimed(device: torch.device, cap: int | None) -> dict[str, Any]:
    """Take the place of the benchmark's `claim`, with an imagined GPU of 8 GiB."""
    card = {"name": "Imagined", "memory": 2**33, "capability": [8, 9], "cuda": "12"}
    return {"device": card, "outside_before": 2**28, "usable": cap or 2**33}


@pytest.fixture
def imagined(bench: ModuleType, small_model: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark with an imagined GPU (`claimed`) and a single small case for it."""
    config = RunConfig.model_validate(
        {
            "model": {"path": str(small_model), "weights": "random"},
            "adapt": {"router": "all"},
            "train": {"sequence_length": 64},
        }
    )
    monkeypatch.setattr(bench, "CASES", {"tiny": lambda: config})
    monkeypatch.setattr(bench, "claim", claimed)
    monkeypatch.setattr(bench, "catalog_name", lambda device: "8GiB")
    return bench


def test_a_case_that_runs(imagined: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(10, 20, 30, 1.0, BALANCED, None)  # type: ignore[arg-type]
    monkeypatch.setattr(Measured, "counts", [[3, 1], [2, 2]])
    monkeypatch.setattr(imagined, "measure", lambda config, device, steps: measured)
    row = json.loads(json.dumps(imagined.run_on_cuda("tiny", None)))
    assert row["measured"] == {"allocated": 10, "reserved": 20, "process": 30}
    assert row["fullest_expert"] == 1.5
    assert row["predicted"] == row["predicted_before"]
    assert imagined.verdict(row) == "fits and ran"
    assert not imagined.is_wrong(row)
    assert imagined.run_on_cuda("tiny", 2**20)["fits"] is False


def test_a_case_that_runs_out_of_memory(imagined: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> None:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(imagined, "measure", lambda config, device, steps: build())
    row = imagined.run_on_cuda("tiny", None)
    assert row["out_of_memory"] == {"loading": True, "message": "no more"}
    assert imagined.verdict(row) == "FALSE FITS: predicted to fit, out of memory while loading"
    assert imagined.is_wrong(row)


@pytest.mark.parametrize(
    ("row", "verdict", "wrong"),
    [
        (ROW, "fits and ran", False),
        (ROW | {"fits": False}, "ran, predicted not to fit", False),
        (FULL, "FALSE FITS: predicted to fit, out of memory", True),
        (FULL | {"fits": False}, "does not fit, out of memory", False),
        ({"case": "some", "failed": "exit code 1"}, "FAILED: exit code 1", True),
    ],
)
def test_verdicts(bench: ModuleType, row: dict[str, Any], verdict: str, wrong: bool) -> None:
    assert bench.verdict(row) == verdict
    assert bench.is_wrong(row) is wrong
    lines = list(bench.lines_of([row]))
    assert len({line.count("|") for line in lines}) == 1
    assert lines[-1].endswith(f"| {verdict} |")


# --- gpu.sh -------------------------------------------------------------------------------------------------------


def gpu_sh(folder: Path, python: str | Path, *parts: str) -> subprocess.CompletedProcess[str]:
    """Run the named parts of gpu.sh, all without any, with this interpreter; logs go to `folder`."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": str(python), "OUT": str(folder)}
    environment["PATH"] = f"{Path(python).parent}:{environment['PATH']}"
    command = ["bash", str(FOLDER / "gpu.sh"), *parts]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def stand_in(tmp_path: Path, pytest_exits: int) -> Path:
    """Write and return a fake `python`, which seems to have a GPU and prints its arguments; its pytest ends with
    `pytest_exits`.

    Beside it is a fake `compute-sanitizer`, which prints its options and runs the command that it is given.
    """
    sanitizer = tmp_path / "compute-sanitizer"
    options = 'while [ "${1#--}" != "$1" ]; do echo "$1 $2"; shift 2; done'
    sanitizer.write_text(f'#!/bin/sh\n{options}\nexec "$@"\n', encoding="utf-8")
    sanitizer.chmod(0o755)
    python = tmp_path / "python"
    cases = f'-m*) echo "$@"; exit {pytest_exits};; scripts*) echo "$@";;'
    python.write_text(f'#!/bin/sh\ncase "$*" in {cases} esac\n', encoding="utf-8")
    python.chmod(0o755)
    return python


def test_a_part_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = gpu_sh(tmp_path / "logs", sys.executable, "mixtrla")
    assert done.returncode == 2
    assert "there is no part 'mixtrla'; there are kernels mixtral qwen3 tests host-time" in done.stderr


@pytest.mark.parametrize("pytest_exits", [0, 1])
def test_with_a_gpu_every_part_runs(bench: ModuleType, tmp_path: Path, pytest_exits: int) -> None:
    done = gpu_sh(tmp_path / "logs", stand_in(tmp_path, pytest_exits))
    assert done.returncode == pytest_exits, done.stderr
    assert "gpu.sh: failed: gpu_tests\n" in done.stderr if pytest_exits else not done.stderr
    logs = {file.stem: file.read_text(encoding="utf-8") for file in (tmp_path / "logs").glob("*.log")}
    assert "-m pytest -m gpu -p no:cacheprovider tests/gpu" in logs.pop("gpu_tests")
    for tool, more in ("memcheck", ""), ("racecheck", "--kernel-regex kne=^_[a-z]\n"):
        options = f"--tool {tool}\n{more}--error-exitcode 1\n"
        assert logs.pop(f"kernels_{tool}") == f"{options}scripts/bench/card.py check --tokens 8\n"
    assert logs.pop("kernels_check") == "scripts/bench/card.py check\n"
    assert logs.pop("kernels_bandwidth").startswith("scripts/bench/card.py bandwidth --json")
    assert logs.pop("equal_steps") == "scripts/bench/card.py repeat\n"
    assert logs.pop("host_time_cuda").startswith("scripts/bench/host_time.py --json")
    assert logs.pop("hybrids_cuda").startswith("scripts/bench/host_time.py --models qwen3-next-80b-a3b kimi")
    assert logs.pop("host_time_16k").startswith("scripts/bench/host_time.py --rows 8 --json")
    assert logs.pop("throughput_peers").startswith("scripts/bench/throughput.py --seconds 35 --json")
    for part in bench.PARTS:
        log = logs.pop(f"predict_vs_measured_cuda_{part}")
        assert log.startswith(f"scripts/bench/predict_vs_measured.py --cases {part} --cap 44GiB --json")
    assert not logs
