"""`moetune train` as a process: two streams, interruption (kills are in tests/training and tests/fuzz)."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from moetune.cli import main
from tests import small
from tests.processes import processes
from tests.training.test_resume import work_alone


@pytest.fixture
def run_file(small_model: Path, small_data: Path, tmp_path: Path) -> Path:
    train = {"steps": 12, "save_every": 2, "eval_every": 6, "log_every": 1}
    run = small.run_file(
        small_model, small_data, tmp_path / "run", "experts", train=train, data={"eval": str(small_data)}
    )
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run), encoding="utf-8")
    return file


def as_a_program(command: list[str], out: Path, err: Path) -> None:
    work_alone()
    for file, stream in ((out, 1), (err, 2)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
    sys.argv = command
    main.main()


def wait_for(has_ended: Callable[[], bool], file: Path, lines: int) -> None:
    """Until a process has written so many lines of the file."""
    end = time.monotonic() + 120
    while not file.exists() or file.read_text().count("\n") < lines:
        assert not has_ended()
        assert time.monotonic() < end
        time.sleep(0.002)


def test_output_for_people_and_for_programs(
    run_file: Path, moetune: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    few = ("--set", "train.steps=4", "--set", "train.eval_every=2")
    ended = moetune("train", run_file, *few)
    assert ended.code == 0
    first, second, *rest = ended.out.splitlines()
    assert first == f"4 steps, 73,984 trained parameters, in {run_file.parent / 'run'}"
    before, after = second.removeprefix("held-out loss ").split(" -> ")
    assert float(after) < float(before)
    assert "trains 73,984 parameters (router 256, experts 73,728)" in ended.err
    assert f"step 4: held-out loss {after}" in ended.err
    assert re.search(r"^step 4/4: loss \S+  \S+ tokens/s  lr 0\.01  0:00:00 left$", ended.err, re.MULTILINE)
    output = run_file.parent / "run"
    assert [line for line in rest if not line.startswith("peak memory: ")] == [
        f"best held-out loss {after}, at step 4",
        f"weights in {output / 'checkpoints' / 'step-4'}, losses in {output / 'metrics.jsonl'}",
        f"next: moetune report {output}",
        f"      moetune export {output} --format merged --out {output}-merged",
    ]

    request.getfixturevalue("unpredicted")
    ended = moetune("train", run_file, *few, "--overwrite", "--json")
    result = json.loads(ended.out)
    assert result["schema"] == 1
    assert (result["steps"], result["output"]) == (4, str(run_file.parent / "run"))
    assert result["trainable"] == {"total": 73_984, "router": 256, "experts": 73_728, "lora": 0, "other": 0}
    assert f"{result['eval_loss_after']:.4f}" == after


def test_a_dry_run(run_file: Path, moetune: Callable[..., Any]) -> None:
    ended = moetune("train", run_file, "--dry-run")
    assert ended.out == f"would train 73,984 parameters into {run_file.parent / 'run'}\n"
    result = json.loads(moetune("train", run_file, "--dry-run", "--json").out)
    assert (result["steps"], result["eval_loss_after"], result["trainable"]["experts"]) == (0, None, 73_728)
    assert [path.name for path in run_file.parent.iterdir()] == ["run.yaml"]


@pytest.mark.full
def test_a_process_says_nothing_else(run_file: Path) -> None:
    """Nothing on stderr but what moetune has to say: no warning and no progress bar of another library."""
    command = [sys.executable, "-m", "moetune", "train", str(run_file), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout)["steps"] == 12
    lines = [re.sub(r"\d[\d.,]*\d|\d", "#", line) for line in ended.stderr.splitlines()]
    assert [line.partition(": trains ")[2] or line for line in lines[:4]] == [
        "# parameters (router #, experts #)",
        "data: # examples in # sequences, # training tokens, # with loss",
        "data: # of # held-out documents are trained on too",
        "length: # steps of # an epoch, # epochs",
    ]
    said = {line for line in lines[4:] if not line.startswith("memory: predicted ")}
    assert said == {"step #: held-out loss #", "step #/#: loss #  # tokens/s  lr #  #:#:# left"}, ended.stderr


@pytest.mark.full
@pytest.mark.slow
def test_interrupted_from_the_keyboard(run_file: Path) -> None:
    out_file, err_file = run_file.parent / "out", run_file.parent / "err"
    command = ["moetune", "train", str(run_file), "--set", "train.steps=2000"]
    process = processes.Process(target=as_a_program, args=(command, out_file, err_file))
    process.start()
    assert process.pid
    wait_for(lambda: not process.is_alive(), run_file.parent / "run" / "metrics.jsonl", 3)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    out, err = out_file.read_text(), err_file.read_text()
    assert process.exitcode == 130, err
    assert out == ""
    assert err.endswith("interrupted; --resume auto continues from the last checkpoint\n")
    assert "Traceback" not in err
