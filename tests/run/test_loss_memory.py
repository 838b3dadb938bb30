"""The loss may take what a layer's backward takes, and so is never the fullest moment of a step because of `auto`."""

from pathlib import Path
from typing import Any

import pytest

from moetune.memory.trace import trace
from moetune.run.loss_memory import LEAST, loss_bytes
from moetune.run.resolve import ResolvedRun, resolve
from tests.run.test_resolve import config_of

LORA = {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}}


def test_bytes_of_the_loss(small_model: Path) -> None:
    sizes = {"256MiB": 2**28, "1 GB": 10**9, "none": None, "0.5GiB": 2**29, "auto": LEAST}
    assert {
        size: loss_bytes(resolve(config_of(small_model, train={"loss_memory": size}), "cpu")) for size in sizes
    } == sizes


def catalog_run(model: str, like: ResolvedRun | None = None, /, **train: Any) -> ResolvedRun:
    return resolve(config_of(Path(model), LORA, train={"micro_batch": 8, **train}), "cuda", like=like)


def test_auto_is_what_the_last_layer_takes_in_backward() -> None:
    """Qwen3-30B-A3B: groups of 32 experts of 2048 × 1536 with 1024 rows each."""
    run = catalog_run("qwen3-30b-a3b")
    matrices, rows, gathered = 32 * 2048 * 1536, 32 * 1024 * (2048 + 1536 + 768), 8 * 2048 * 8 * 2048
    assert loss_bytes(run) == 2 * (matrices + rows + gathered)
    assert loss_bytes(run, 1) == 2 * (matrices + (rows + gathered) // 8)
    kept = catalog_run("qwen3-30b-a3b", run, keep_rows=1)
    assert loss_bytes(kept) == 2 * (matrices + 32 * 1024 * 2048 + gathered)
    only = catalog_run("qwen3-30b-a3b", run, checkpointing="experts_only")
    assert loss_bytes(only) == 2 * (matrices + rows)


def test_experts_that_are_computed_alone_take_less() -> None:
    """Those that train and whose gradients leave in backward, and those of several kinds."""
    optimizer = {"name": "lomo"}
    train = {"micro_batch": 8, "accumulate": 1}
    for experts, sections in (({"layers": "all"}, {"optimizer": optimizer}), ({"ids": [0]}, {})):
        run = resolve(config_of(Path("olmoe-1b-7b"), {"experts": experts}, train=train, **sections), "cuda")
        assert loss_bytes(run) == LEAST


def test_matrices_that_are_not_dequantized_are_no_room() -> None:
    """Of OLMoE in bf16, in groups of 32 experts; and nothing is room where no layer has a backward pass."""
    run = olmoe_in_bf16(LORA)
    assert loss_bytes(run, 16) == 2 * (rows_of_group(32) + 16 * 2048 * 8 * 2048)
    assert loss_bytes(olmoe_in_bf16({"also": ["lm_head"]}), 16) == LEAST


def rows_of_group(experts: int) -> int:
    """Elements of the rows of OLMoE's experts in balanced routing of 16 × 2048 tokens: x, gate_up and act."""
    return 16 * 2048 * 8 * experts // 64 * (2048 + 2048 + 1024)


def olmoe_in_bf16(adapt: dict[str, Any], **sections: Any) -> ResolvedRun:
    return resolve(config_of(Path("olmoe-1b-7b"), adapt, model={"base": "bf16"}, **sections), "cuda")


@pytest.mark.full
@pytest.mark.parametrize(
    "train",
    [
        {},
        {"keep_rows": 8},
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
