"""The commands on CUDA: a run that is killed and resumed leaves whole results; what does not fit says so."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open

from tests import small

STEPS = 12


def start(*arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.nullcuda", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    )


def moetune(*arguments: str | Path) -> tuple[str, str]:
    """Runs a command that succeeds; what it wrote to both streams."""
    process = start(*arguments)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out, err


def names_of(file: Path) -> set[str]:
    with safe_open(file, "pt") as tensors:
        return set(tensors.keys())


@pytest.mark.parametrize(
    ("adapt", "residence", "formats"),
    [("experts", "gpu", ("delta", "merged")), ("lora", "host", ("peft",))],
    ids=["experts", "lora"],
)
def test_train_killed_resumed_and_exported(
    adapt: str, residence: str, formats: tuple[str, ...], small_model: Path, small_data: Path, tmp_path: Path
) -> None:
    run = small.run_file(
        small_model,
        small_data,
        tmp_path / "run",
        adapt,
        model={"experts_on": residence},
        train={"steps": STEPS, "save_every": 2, "eval_every": 6, "log_every": 1, "keep_rows": "auto"},
        data={"eval": str(small_data)},
    )
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run), encoding="utf-8")

    killed = start("train", file)
    second_checkpoint = tmp_path / "run/checkpoints/step-4"
    while not second_checkpoint.exists():
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL

    moetune("train", file, "--resume", "auto")
    metrics = [line for line in small.read_metrics(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert all(line["peak_allocated"] > 0 for line in metrics)
    written = yaml.safe_load((tmp_path / "run/run.yaml").read_text(encoding="utf-8"))
    assert written["train"]["keep_rows"] == small.LAYERS  # all fit the card at hand
    memory: dict[str, Any] = json.loads((tmp_path / "run/memory.json").read_text())
    assert memory["measured"]["peak_reserved"] >= memory["measured"]["peak_allocated"] > 0

    for form in formats:
        out = tmp_path / form
        moetune("export", tmp_path / "run", "--format", form, "--out", out)
        names = set().union(*(names_of(tensors) for tensors in out.glob("*.safetensors")))
        if form == "merged":
            assert names == set().union(*(names_of(tensors) for tensors in small_model.glob("*.safetensors")))
        else:
            assert names, form


def test_what_does_not_fit_raises_torchs_own_error(toy_model: Path, tmp_path: Path) -> None:
    """As cards around what is predicted: one page more than that fits, a fifth less does not."""
    run = {
        "model": {"path": str(toy_model), "weights": "random", "dtype": "bf16", "base": "bf16"},
        "adapt": {"also": ["*"]},
        "optimizer": {"name": "adamw"},
        "train": {"micro_batch": 4, "accumulate": 1, "sequence_length": 512},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run), encoding="utf-8")
    out, _ = moetune("predict", file, "--json")
    needed = json.loads(out)["ranks"][0]["peak_reserved"]
    fits = start("verify", file, "--json", NULL_GIB=str((needed + (22 << 20)) / 2**30))
    small_card = start("verify", file, "--json", NULL_GIB=str(needed * 0.8 / 2**30))
    out, err = fits.communicate()
    assert fits.returncode == 0, err
    assert json.loads(out)["measured"]["peak_reserved"] <= needed + (22 << 20)
    _, err = small_card.communicate()
    assert small_card.returncode != 0
    assert "CUDA out of memory. Tried to allocate" in err


def test_without_a_gpu_it_is_the_card_of_this_machine_and_what_is_free(toy_model: Path) -> None:
    """Of a card that a user does not name, predictions say so; one that is named comes first."""
    out, err = moetune("predict", toy_model, "--lora", "8", "--json")
    found = json.loads(out)
    free, total = torch.cuda.mem_get_info()
    assert 0.98 * free <= found["gpu"]["usable_bytes"] <= total
    assert "free now" in found["about"]["card"]
    assert "free now" in err
    named, err = moetune("predict", toy_model, "--lora", "8", "--gpu", "24GiB", "--json")
    assert json.loads(named)["gpu"] == {"name": "24GiB", "usable_bytes": 24 << 30}
    assert "free now" not in err


@pytest.mark.full
def test_a_run_file_for_the_card_of_this_machine(toy_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    moetune("init", toy_model, "--goal", "router", "--out", file)
    assert yaml.safe_load(file.read_text(encoding="utf-8"))["adapt"] == {"router": "all"}
    assert "fits: yes" in file.read_text(encoding="utf-8")
