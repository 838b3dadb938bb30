"""Training killed with SIGKILL and resumed is the training that was never interrupted, bit for bit.

The processes are real: forked from a server that has imported everything, so that each costs only its own training.
A process kills itself at an exact moment, which no polling from outside could hit.
"""

import gc
import importlib
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.training.folder.manifest import write_manifest
from moetune.training.folder.run_folder import RunFolder
from tests import small
from tests.processes import processes
from tests.resolved import train
from tests.thinned import thinned

Moment = tuple[str, int, str]
"""A function, the number of its call, and whether the process dies `before` it, `after` it, or `within` a write."""

MOMENTS: dict[str, Moment] = {
    "nothing but an empty folder": ("moetune.training.folder.run_writer.write_whole", 1, "before"),
    "run file not renamed": ("os.fsync", 2, "after"),
    "base not noted": ("moetune.training.folder.run_writer.write_whole", 2, "before"),
    "no metrics file": ("moetune.training.folder.run_writer.write_whole", 4, "before"),
    "before the first checkpoint": ("moetune.training.step.stepper.forward_pass", 4, "before"),
    "within the first checkpoint": ("moetune.training.folder.checkpoint.save_file", 1, "after"),
    "a checkpoint complete but for its name": ("moetune.training.folder.run_writer.publish", 1, "before"),
    "just after a checkpoint": ("moetune.training.folder.run_writer.publish", 1, "after"),
    "between checkpoints, mid-step": ("moetune.training.step.stepper.forward_pass", 9, "before"),
    "within a line of metrics": ("moetune.training.folder.run_writer.RunWriter.append_metrics", 6, "within"),
    "within the second checkpoint": ("moetune.training.folder.checkpoint.dcp.save", 2, "after"),
    "an old checkpoint half removed": ("moetune.atomic.shutil.rmtree", 1, "before"),
    "after the epoch's end": ("moetune.training.step.stepper.forward_pass", 13, "before"),
}
# Eight steps of two micro-batches; the data end after four steps, of which the last has one micro-batch. Logging,
# evaluation and checkpoints come at different steps. The model draws random numbers at every step.
TRAIN = {
    "steps": 8,
    "log_every": 2,
    "eval_every": 4,
    "save_every": 3,
    "keep_checkpoints": 1,
    "warmup": 2,
    "schedule": "cosine",
}


def work(run: dict[str, Any], resume: str, moment: Moment | None) -> None:
    """What a process does: train, and die if told so."""
    work_alone()
    if moment is not None:
        die_at(*moment)
    train(RunConfig.model_validate(run), resume=resume)


def work_alone() -> None:
    """What a process that trains does first."""
    gc.freeze()  # what the server imported stays; tests/conftest.py says what that is good for
    torch.set_num_threads(1)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)


def die_at(function: str, call: int, when: str) -> None:
    path, name = function.rsplit(".", 1)
    try:
        owner = importlib.import_module(path)
    except ModuleNotFoundError:
        module, owner_name = path.rsplit(".", 1)
        owner = getattr(importlib.import_module(module), owner_name)
    original, calls = getattr(owner, name), 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and when == "within":
            args[0].metrics_file.open("a").write('{"step": 4, "los')
        if calls == call and when != "after":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **kwargs)
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)


def in_process(run: dict[str, Any], resume: str = "never", moment: Moment | None = None) -> None:
    """Trains in a process of its own, which ends well, or is killed at the moment."""
    process = processes.Process(target=work, args=(run, resume, moment))
    process.start()
    process.join(60)
    assert process.exitcode == (0 if moment is None else -signal.SIGKILL)


def outcome(run: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], dict[str, Any]]:
    """Metrics without those that are times, trained tensors, and the optimizer's and the generators' states."""
    folder = Path(run["output"])
    lines = small.metrics_without_times(folder)
    last = folder / "checkpoints" / f"step-{run['train']['steps']}"
    states = (last / "optimizer").glob("*.safetensors")  # none where the optimizer has no states
    optimizer = {
        "tensors": {name: tensor for file in states for name, tensor in load_file(file).items()},
        "numbers": json.loads((last / "optimizer.json").read_text()),
        "generators": {
            f"{file.stem}: {name}": state
            for file in (last / "generators").glob("*.safetensors")
            for name, state in load_file(file).items()
        },
    }
    return lines, load_file(last / "trained.safetensors"), optimizer


def assert_same(run: dict[str, Any], reference: dict[str, Any]) -> None:
    lines, tensors, optimizer = outcome(run)
    true_lines, true_tensors, true_optimizer = outcome(reference)
    assert lines == true_lines
    assert tensors.keys() == true_tensors.keys()
    assert all(torch.equal(tensors[name], true_tensors[name]) for name in tensors)
    assert optimizer["numbers"] == true_optimizer["numbers"]
    for kind in ("tensors", "generators"):
        torch.testing.assert_close(optimizer[kind], true_optimizer[kind], rtol=0, atol=0)
    left = sorted(path.name for path in Path(run["output"]).rglob(".*"))
    assert left == [".moetune"], "half-written files stayed behind"


def elsewhere(run: dict[str, Any], output: Path) -> dict[str, Any]:
    return run | {"output": str(output)}


def brought(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The run with its base and data copied into a folder, if they are not there."""
    if not folder.exists():
        shutil.copytree(run["model"]["path"], folder / "base")
        for split in ("train", "eval"):
            shutil.copy(run["data"][split], folder / f"{split}.jsonl")
    paths = {split: str(folder / f"{split}.jsonl") for split in ("train", "eval")}
    return run | {"model": run["model"] | {"path": str(folder / "base")}, "data": run["data"] | paths}


def trained(model: Path, data: Path, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """A run file with held-out data, trained to its end in one go."""
    held_out = small.write_data(folder / "eval.jsonl", small.DATA[:3])
    run = small.run_file(model, data, folder / "run", "lora", train=settings, data={"eval": str(held_out)})
    in_process(run)
    return run


@pytest.fixture(scope="module")
def never_killed(noisy_model: Path, small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run file that has been trained to its end in one go."""
    return trained(noisy_model, small_data, tmp_path_factory.mktemp("reference"), TRAIN)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("moment", thinned(MOMENTS, 3, ("within the first checkpoint",)))
def test_killed_and_resumed(moment: str, never_killed: dict[str, Any], tmp_path: Path) -> None:
    """Base and data have moved meanwhile; both are compared by content."""
    run = elsewhere(never_killed, tmp_path / "run")
    in_process(brought(run, tmp_path / "here"), moment=MOMENTS[moment])
    (tmp_path / "here").rename(tmp_path / "there")
    in_process(brought(run, tmp_path / "there"), resume="auto")
    assert_same(run, never_killed)


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw8bit": ("experts", {"optimizer": {"name": "adamw8bit", "lr": 1.0e-3}}),
    "masters and rounding": (
        "experts",
        {
            "model": {"dtype": "bf16"},
            "optimizer": {
                "experts": {"name": "adamw", "lr": 1.0e-3, "master_weights": "fp32"},
                "router": {"name": "ademamix8bit", "lr": 1.0e-3, "master_weights": "stochastic"},
            },
        },
    ),
    "factors in bf16": (
        "lora",
        {
            "adapt": {"lora": small.ADAPT["lora"]["lora"] | {"dtype": "bf16"}},
            "optimizer": {"name": "adamw8bit", "lr": 1.0e-3},
        },
    ),
    "float16": (
        "experts",
        {"model": {"dtype": "fp16"}, "optimizer": {"name": "lomo", "lr": 0.1}, "train": {"accumulate": 1}},
    ),
}


@pytest.mark.full
@pytest.mark.one_in(4)
@pytest.mark.parametrize("other", OTHERS)
def test_other_runs_killed_and_resumed(other: str, noisy_model: Path, small_data: Path, tmp_path: Path) -> None:
    adapt, sections = OTHERS[other]
    sections = {**sections, "train": TRAIN | sections.get("train", {})}
    reference = small.run_file(noisy_model, small_data, tmp_path / "reference", adapt, **sections)
    in_process(reference)
    run = elsewhere(reference, tmp_path / "run")
    in_process(run, moment=("moetune.training.step.stepper.forward_pass", 9, "before"))
    in_process(run, resume="auto")
    assert_same(run, reference)


@pytest.mark.full
def test_resumed_from_a_named_checkpoint(never_killed: dict[str, Any], tmp_path: Path) -> None:
    """What came after it is undone, so that a kill right then leaves a run that `auto` continues."""
    run = elsewhere(never_killed, tmp_path / "run")
    run["train"] = run["train"] | {"keep_checkpoints": 3}
    in_process(run)
    in_process(
        run,
        resume=str(tmp_path / "run" / "checkpoints" / "step-3"),
        moment=("moetune.training.step.stepper.forward_pass", 1, "before"),
    )
    assert [path.name for path in RunFolder(tmp_path / "run").checkpoints()] == ["step-3"]
    assert [line["step"] for line in small.read_metrics(tmp_path / "run")] == [0, 2, 3]
    in_process(run, resume="auto")
    assert_same(run, never_killed)


def test_earlier_losses_that_are_gone_are_said(
    never_killed: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(never_killed["output"])
    shutil.copytree(source, tmp_path / "run")
    run = elsewhere(never_killed, tmp_path / "run")
    run["train"] = run["train"] | {"steps": 9}
    (tmp_path / "run" / "metrics.jsonl").unlink()
    train(RunConfig.model_validate(run), resume="auto")
    assert "metrics.jsonl is gone" in capsys.readouterr().err
    assert {line["step"] for line in small.read_metrics(tmp_path / "run")} == {9}


@pytest.mark.parametrize("steps", [3, 2])
def test_a_finished_run_stays_as_it_is(steps: int, small_model: Path, small_data: Path, tmp_path: Path) -> None:
    """Also if it ended within an epoch, and if it has gone further than it should now."""
    run = small.run_file(small_model, small_data, tmp_path / "run", data={"eval": str(small_data)})
    done = train(RunConfig.model_validate(run))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    run["train"] = run["train"] | {"steps": steps}
    assert train(RunConfig.model_validate(run), resume="auto") == done
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


class Mkdir:
    """Unpickling this makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.folder,)


ONE_FILE = "optimizer/shard-00001-model-00001-of-00001.safetensors"
"""Of a small optimizer's states."""


@pytest.fixture(scope="module")
def at_step_3(never_killed: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed after its first checkpoint."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    in_process(elsewhere(never_killed, folder), moment=("moetune.training.step.stepper.forward_pass", 9, "before"))
    return folder


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("generators/0.safetensors", "Error while deserializing header"),
        ("trained.safetensors", "Error while deserializing header"),
        (ONE_FILE, "Error while deserializing header"),
        ("optimizer.json", ""),
    ],
)
def test_code_in_a_checkpoint_never_runs(
    name: str, reason: str, at_step_3: Path, never_killed: dict[str, Any], tmp_path: Path
) -> None:
    run = elsewhere(never_killed, Path(shutil.copytree(at_step_3, tmp_path / "run")))
    checkpoint = tmp_path / "run" / "checkpoints" / "step-3"
    assert (checkpoint / name).is_file()
    torch.save({"state": Mkdir(tmp_path / "executed")}, checkpoint / name)
    with pytest.raises(UserError, match=rf"no checkpoint .* is undamaged:\n.*step-3: {name} "):
        train(RunConfig.model_validate(run), resume="auto")
    write_manifest(checkpoint, 3)  # whoever can write there can do that too
    with pytest.raises(UserError, match=rf"step-3.* (is damaged|cannot be read): {reason}"):
        train(RunConfig.model_validate(run), resume="auto")
    assert not (tmp_path / "executed").exists()
