"""What layers keep by `checkpointing: auto` takes what is predicted, and fits the card that it was chosen for."""

import sys
from pathlib import Path
from typing import Any

import pytest

from moetune.memory.trace import trace
from moetune.models.catalog.gpus import find_gpu
from moetune.planning.settle import settled
from moetune.run.resolve import ResolvedRun, resolve

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts/bench"))
from near_the_line import card_here, judge
from predict_vs_measured import catalog_run

LORA = {"lora": {"rank": 16, "alpha": 32, "targets": ["attention", "experts"]}}


def chosen(model: str, gpu: str, train: dict[str, Any], **sections: Any) -> ResolvedRun:
    """The run with what its layers keep on this card."""
    settings = {"sequence_length": 2048, "accumulate": 2, "checkpointing": "auto", **train}
    sections = {"optimizer": {"name": "adamw8bit"}, "data": {"train": "unread", "packing": True}, **sections}
    adapt = {"lora": {**LORA["lora"], "targets": ["attention"]}} if model.startswith("llama") else LORA
    run = resolve(catalog_run(model, adapt, train=settings, **sections), "cuda")
    return settled(run, card_here(gpu))


@pytest.mark.parametrize(
    ("model", "gpu", "rows"),
    [
        ("mixtral-8x7b", "44GiB", 4),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("mixtral-8x7b", "30GiB", 4),
                ("mixtral-8x7b", "80GiB", 8),
                ("qwen3-30b-a3b", "24GiB", 1),
                ("qwen3-30b-a3b", "44GiB", 4),
                ("gpt-oss-20b", "24GiB", 2),
                ("deepseek-v2-lite", "15GiB", 2),
                ("olmoe-1b-7b", "10GiB", 4),
                ("llama-3-8b", "15GiB", 1),
            )
        ),
    ],
)
def test_what_is_chosen_fits_and_takes_what_is_predicted(model: str, gpu: str, rows: int) -> None:
    run = chosen(model, gpu, {"micro_batch": rows})
    assert run.keeps
    row = judge(model, run.config, gpu, rows)
    assert (row["verdict"], row["ran"]) == ("yes", True)
    assert row["measured"]["allocated"] == pytest.approx(row["required"] - row["outside"], rel=0.001)


def test_a_third_less_is_repeated() -> None:
    """Mixtral with LoRA, 4 × 2,048 tokens on 44 GiB: operations of a step beside `full` and `none`."""
    run = chosen("mixtral-8x7b", "44GiB", {"micro_batch": 4})
    card = find_gpu("l40s")

    def flops(checkpointing: Any) -> float:
        one = resolve(run.config.but(train={"checkpointing": checkpointing}), "cuda", like=run)
        return sum(work.flops + work.flops32 for work in trace(one, gpu=card).work.values())

    full, auto, none = flops("full"), flops(run.config.train.checkpointing), flops("none")
    assert (full - auto) / (full - none) > 1 / 3
