"""`moetune train` over several ranks: every layout with all that can train starts, evaluates, saves and is resumed."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from moetune.cli import main, start_on_ranks
from moetune.parallel.start_ranks import free_port
from moetune.watch import memory_record
from tests import small
from tests.conftest import Ended
from tests.parallel import layouts, world
from tests.parallel.test_deepspeed import with_deepspeed

ROWS, MICRO_BATCHES = 1, 4
"""Rows of a micro-batch, and micro-batches of all ranks in a step."""

_LORA = {"rank": 4, "alpha": 8, "targets": ["attention"], "layers": "all"}
ADAPT: dict[str, dict[str, Any]] = small.ADAPT | {
    "router, norm": {"router": "all", "also": ["norm"]},
    "experts, norm": small.ADAPT["experts"] | {"also": ["norm"]},
    "lora, norm": small.ADAPT["lora"] | {"also": ["norm"]},
    "all": small.ADAPT["experts"] | {"lora": _LORA, "also": ["norm"]},
}
LAYOUTS: dict[str, dict[str, Any]] = (
    layouts.LAYOUTS
    | {
        "fsdp 2, no reshard": {"fsdp": 2, "reshard": False},
        "zero 1, ep 2": {"fsdp": 2, "ep": 2, "zero": 1},
        "zero 2, ep 2": {"fsdp": 2, "ep": 2, "zero": 2},
        "ep 2, no reshard": {"fsdp": 2, "ep": 2, "reshard": False},
        "ep 2 × fsdp 2, zero 1": {"fsdp": 4, "ep": 2, "zero": 1},
        "replicate 2 × fsdp 2, zero 2": {"replicate": 2, "fsdp": 2, "zero": 2},
        "replicate 2, ep 2": {"replicate": 2, "ep": 2},
        "tp 2": {"tp": 2},
    }
    | layouts.DEEPSPEED
)
ON_A_PUSH = {("ep 2, no reshard", "all")}
"""All that can train; more layouts are in test_layouts.py and test_runs.py."""


def cases() -> list[Any]:
    return [
        pytest.param(
            layout,
            adapt,
            marks=[
                *([] if (layout, adapt) in ON_A_PUSH else [pytest.mark.full]),
                *([with_deepspeed] if layout in layouts.DEEPSPEED else []),
            ],
        )
        for layout in LAYOUTS
        for adapt in ADAPT
    ]


def on_a_rank(rank: int, count: int, port: str, arguments: Sequence[str]) -> tuple[int, str]:
    """The command on one of the ranks, as its launcher starts it: the exit code, and what it said."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    sys.argv = ["moetune", *arguments]
    if "--resume" not in arguments:  # the last of a test's runs is predicted, the one whose memory is read
        memory_record.predicted = lambda *_: memory_record.Predicted()
    said, code = io.TextIOWrapper(io.BytesIO()), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main.main()
        except SystemExit as end:
            code = int(end.code or 0)
    said.seek(0)
    return code, said.read()


def start_in_forks(command: Sequence[str], count: int) -> int:
    """`start_ranks` without importing everything anew."""
    ended = world.run(count, on_a_rank, count, str(free_port()), tuple(command[3:]), joined=False)
    for code, said in ended:
        print(said, file=sys.stderr)
        if code:
            return code
    return 0


def write_run(parallel: dict[str, Any], adapt: str, model: Path, data: Path, output: Path, **settings: Any) -> Path:
    data_ranks = parallel.get("fsdp", 1) * parallel.get("replicate", 1)
    run = small.run_file(
        model, data, output, "router",
        model={"path": str(model), "base": "fp32", "dtype": "fp32"},
        optimizer={"lr": 1.0e-3},
        train={"micro_batch": ROWS, "accumulate": MICRO_BATCHES // data_ranks, "steps": 1, "eval_every": 1,
               "save_every": 1, "sequence_length": 48, "router_aux_loss": 0.01, "max_grad_norm": 0.15},
        data={"train": str(data), "eval": str(data), "packing": True},
        parallel=parallel,
        hardware={"count": data_ranks * parallel.get("tp", 1)},
    ) | {"adapt": ADAPT[adapt]} | settings  # fmt: skip
    file = output.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(run), encoding="utf-8")
    return file


def run(moetune: Callable[..., Ended], *arguments: str | Path) -> None:
    ended = moetune("train", *arguments)
    assert ended.code == 0, ended.err


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "adapt"), cases())
def test_a_layout_through_its_command(
    layout: str,
    adapt: str,
    small_model: Path,
    small_data: Path,
    tmp_path: Path,
    moetune: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An evaluation and a save at one step; what is logged is what one process logs."""
    one, many = tmp_path / "one", tmp_path / "many"
    with monkeypatch.context() as unpredicted:
        unpredicted.setattr(memory_record, "predicted", lambda *_: memory_record.Predicted())
        run(moetune, write_run({}, adapt, small_model, small_data, one), "--set", "train.steps=2")
    monkeypatch.setattr(start_on_ranks, "start_ranks", start_in_forks)
    file = write_run(LAYOUTS[layout], adapt, small_model, small_data, many)
    run(moetune, file)
    run(moetune, file, "--resume", "auto", "--set", "train.steps=2")
    assert (many / "checkpoints" / "step-2" / "trained.safetensors").is_file()
    memory = json.loads((many / "memory.json").read_text())
    predicted, measured = memory["predicted"]["as_routed"], memory["measured"]["peak_allocated"]
    if layout in layouts.DEEPSPEED:  # traced by its own code
        assert predicted is None
    else:
        assert measured == pytest.approx(predicted, rel=1e-3)
    logged = [small.metrics_without_times(folder) for folder in (one, many)]
    assert [line["step"] for line in logged[0]] == [line["step"] for line in logged[1]]
    for its, mine in zip(*logged, strict=True):
        for key in {"loss", "eval_loss", "grad_norm", "router_loss"} & its.keys():
            assert mine[key] == pytest.approx(its[key], rel=1e-5), key
