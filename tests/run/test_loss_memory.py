"""The loss may take what a group of experts does, and so is never the fullest moment of a step because of `auto`."""

from pathlib import Path
from typing import Any

import pytest

from moetune.memory.trace import trace
from moetune.run.resolve import ResolvedRun, resolve
from moetune.run.resolved import LEAST_LOSS_MEMORY
from tests.run.test_resolve import config_of

LORA = {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}}


def test_bytes_of_the_loss(small_model: Path) -> None:
    sizes = {"256MiB": 2**28, "1 GB": 10**9, "none": None, "0.5GiB": 2**29, "auto": LEAST_LOSS_MEMORY}
    assert {
        size: resolve(config_of(small_model, train={"loss_memory": size}), "cpu").loss_memory for size in sizes
    } == sizes


def test_auto_is_the_memory_of_experts(small_model: Path) -> None:
    for asked, expected in (("0", LEAST_LOSS_MEMORY), ("1MiB", LEAST_LOSS_MEMORY), ("1GiB", 2**30)):
        run = resolve(config_of(small_model, train={"expert_memory": asked}), "cpu")
        assert run.loss_memory == expected


def catalog_run(model: str, like: ResolvedRun | None = None, /, **train: Any) -> ResolvedRun:
    return resolve(config_of(Path(model), LORA, train={"micro_batch": 8, **train}), "cuda", like=like)


@pytest.mark.full
@pytest.mark.parametrize(
    "train",
    [
        {},
        {"keep_rows": 8},
        {"expert_memory": "768MiB"},
        *(pytest.param({"checkpointing": how}, marks=pytest.mark.full) for how in ("none", "offload")),
    ],
)
def test_the_peak_stays(train: dict[str, Any]) -> None:
    like = None
    peaks = {}
    for memory in ("1MiB", "auto", "4GiB"):
        run = like = catalog_run("qwen3-30b-a3b", like, loss_memory=memory, **train)
        peaks[memory] = trace(run).parts().total
    assert peaks["1MiB"] == peaks["auto"] < peaks["4GiB"]
