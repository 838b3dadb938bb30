"""Every command that writes, ended by signals at random moments and begun again, leaves what it leaves undisturbed."""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from moetune.adapt.weights.quantize import quantize
from moetune.atomic import sweep
from moetune.config.schema import RunConfig
from moetune.exporting.adapter import merge_adapter
from moetune.exporting.apply import apply_delta
from moetune.exporting.export import export
from moetune.inference.completions import complete
from moetune.parallel.start_ranks import start_ranks
from moetune.routing.score import score, to_score
from moetune.run.resolve import resolve
from tests import small
from tests.processes import processes
from tests.resolved import train
from tests.training.test_resume import assert_same, work_alone

LONG = ("train", "two ranks")
OTHERS = ("peft", "merged", "vllm", "score", "delta", "merge", "generate")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
Work = Callable[[Path, bool], None]
"""Writes to a folder; the second time it goes on with, or replaces, what is there."""


@pytest.fixture(scope="module")
def runs(small_model: Path, small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose experts train and one with LoRA, a delta, an adapter, and prompts."""
    folder = tmp_path_factory.mktemp("signals")
    for adapt in ("experts", "lora"):
        train(small.run_config(small_model, small_data, folder / adapt, adapt, train={"steps": 1}))
    for adapt in ("experts", "lora"):
        config = small.run_config(small_model, small_data, folder / adapt, adapt, train={"steps": 2, "save_every": 1})
        train(config, overwrite=True)
    export(folder / "experts", "delta", folder / "delta")
    export(folder / "lora", "peft", folder / "adapter")
    small.write_data(folder / "prompts.jsonl", [{"prompt": "a" * length} for length in range(1, 9)])
    shutil.copytree(small_model, folder / "model")
    first = processes.Process(target=work_alone)  # begins the server of processes, which takes longer than they do
    first.start()
    first.join()
    return folder


def work(command: str, runs: Path, out: Path, again: bool, run: dict[str, Any]) -> None:
    work_alone()
    overwrite = again
    if command == "two ranks":
        file = out.parent.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(run | {"output": str(out)}))
        resume = "auto" if again else "never"
        raise SystemExit(start_ranks([sys.executable, "-m", "moetune", "train", str(file), "--resume", resume], 2))
    if command == "train":
        train(RunConfig.model_validate(run | {"output": str(out)}), resume="auto" if again else "never")
    elif command == "quantize":
        quantize(runs / "model", out, overwrite=overwrite)
    elif command == "apply":
        apply_delta(runs / "delta", runs / "model", out, overwrite=overwrite)
    elif command == "merge":
        merge_adapter(str(runs / "model"), runs / "adapter", out, overwrite=overwrite)
    elif command == "generate":
        out.mkdir(exist_ok=True)
        if not (out / "texts.jsonl").exists():  # a whole one stays
            complete(runs / "model", str(runs / "prompts.jsonl"), out / "texts.jsonl", batch=2, max_new_tokens=8)
        sweep(out / "texts.jsonl")
    elif command == "score":
        out.mkdir(exist_ok=True)
        scored = to_score(RunConfig.model_validate(run))
        names, file = [run["data"]["train"]], out / "scores.json"
        score(resolve(scored, "cpu"), names, 10**9, file, overwrite=again, device="cpu")
    else:
        trained = "lora" if command in ("peft", "vllm") else "experts"
        export(runs / trained, command, out, overwrite=overwrite)  # type: ignore[arg-type]


def in_process(*arguments: Any, number: int | None = None, after: float = 60.0) -> int:
    process = processes.Process(target=work, args=arguments)
    process.start()
    process.join(after)
    if number is not None and process.is_alive():
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(process.pid or 0, number)
        while any(Path(f"/proc/{rank}/exe").exists() for rank in ranks):  # they go when they see that it has gone
            time.sleep(0.05)
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "command",
    [
        *(pytest.param(command, marks=pytest.mark.full) for command in (*LONG, *OTHERS)),
        "apply",
        "quantize",
    ],
)
def test_signals_at_random_moments(
    command: str, runs: Path, small_model: Path, small_data: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    run = small.run_file(small_model, small_data, tmp_path / "x", "lora", train={"steps": 4, "save_every": 1})
    if command == "two ranks":
        run |= {"parallel": {"fsdp": 2, "timeout": 60}, "hardware": {"count": 2}}
        run["train"]["accumulate"] = 1
    reference = tmp_path / "reference" / "out"
    reference.parent.mkdir()
    begun = time.perf_counter()
    assert in_process(command, runs, reference, False, run) == 0
    seconds = time.perf_counter() - begun
    draw = random.Random(command)
    interrupted = 0
    turns = {"two ranks": 1, "train": 6}.get(command, 8 if pytestconfig.getoption("--all") else 1)
    rounds = [(number, turn) for turn in range(turns) for number in SIGNALS]
    for index, (number, _) in enumerate(rounds):
        out = tmp_path / f"try-{index}" / "out"
        out.parent.mkdir()
        for again in (False, True):  # the second beginning is disturbed, too
            if in_process(command, runs, out, again, run, number=number, after=draw.uniform(0, seconds)):
                interrupted += 1
            else:
                seconds *= 0.7  # it had ended
        assert in_process(command, runs, out, True, run) == 0, f"{signal.Signals(number).name}, round {index}"
        if command in LONG:
            assert_same(run | {"output": str(out)}, run | {"output": str(reference)})
        else:
            assert contents(out) == contents(reference), f"{signal.Signals(number).name}, round {index}"
        assert os.listdir(out.parent) == ["out"]
    assert interrupted
    print(f"{command}: {interrupted} interrupted, {len(rounds)} ended equal")
