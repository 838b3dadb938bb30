"""How long a step takes: arithmetic of the roofline, and runs that others have published."""

import json
from pathlib import Path
from typing import Any

import pytest

from moetune.config.schema import RunConfig
from moetune.memory.time.estimate import FACTORS, duration
from moetune.memory.time.work import Work
from moetune.memory.trace import trace
from moetune.models.catalog.gpus import find_gpu
from moetune.run.resolve import resolve

CARD = find_gpu("h100")
GEMMA_4_26B_A4B = {
    "model_type": "gemma4_text", "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    "global_head_dim": 512, "vocab_size": 262144, "hidden_size_per_layer_input": 0,
    "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
    "sliding_window": 1024, "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
    "layer_types": ([*["sliding_attention"] * 5, "full_attention"]) * 5,
}  # fmt: skip
"""google/gemma-4-26B-A4B's text model, as its config.json has it, but for the keys of five layers, which are of as many
heads as all others' here, and not values too: 2 % of the weights that a token meets."""


def test_the_slower_of_arithmetic_and_memory_counts() -> None:
    assert CARD.bf16 is not None
    assert CARD.bandwidth is not None
    flops, size = 4 * 10**14, 10**9
    one = duration({"experts": Work(flops=flops, product_bytes=size)}, 1000, CARD)
    assert one is not None
    assert one.seconds.fast == pytest.approx(flops / (CARD.bf16.value * FACTORS["products"].fast))
    assert one.seconds.slow == pytest.approx(flops / (CARD.bf16.value * FACTORS["products"].slow))
    assert one.tokens_per_second.fast == pytest.approx(1000 / one.seconds.fast)
    assert one.share.fast == pytest.approx(FACTORS["products"].fast)
    other = duration({"experts": Work(flops=10**9, product_bytes=100 * size, bytes=size)}, 1000, CARD)
    assert other is not None
    assert other.seconds.slow == pytest.approx(101 * size / (CARD.bandwidth.value * FACTORS["memory"].slow))


def test_what_runs_beside_the_card_counts_at_the_slow_end_only() -> None:
    work: dict[Any, Work] = {"rest": Work(bytes=10**12, launches=100), "transfers": Work(copies=1, copied=10**9)}
    both, without = duration(work, 1, CARD), duration({"rest": work["rest"]}, 1, CARD)
    assert both is not None
    assert without is not None
    assert both.seconds.fast == without.seconds.fast
    assert both.seconds.slow == pytest.approx(without.seconds.slow + both.parts["transfers"].slow)
    assert sum(part.slow for part in both.parts.values()) == pytest.approx(both.seconds.slow)


def test_what_was_measured_stands_in_for_the_factors() -> None:
    estimated = duration({"experts": Work(flops=10**14)}, 2000, CARD)
    assert estimated is not None
    one = estimated.as_measured(500.0)
    assert one.seconds.fast == one.seconds.slow == 4.0
    assert one.hours(1_800_000).slow == pytest.approx(1.0)


def test_of_a_card_given_by_its_size_nothing_is_said() -> None:
    assert duration({"experts": Work(flops=1)}, 1, find_gpu("44GiB")) is None


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "gpu", "train", "published"),
    [
        # Unsloth 2026.9, QLoRA of rank 16 on attention and experts: two rows of about 1,700 tokens
        ("mixtral-8x7b", "rtx-5090", {"micro_batch": 2, "sequence_length": 1700}, (447, 537)),
        # Axolotl, LoRA of rank 16 on NF4, rows of 4,096 tokens
        ("gemma-4-26b-a4b", "rtx-pro-6000", {"sequence_length": 4096}, (1940, 1940)),
    ],
)
def test_published_runs_lie_in_the_range(
    model: str, gpu: str, train: dict[str, int], published: tuple[int, int], tmp_path: Path
) -> None:
    if model == "gemma-4-26b-a4b":
        (tmp_path / "config.json").write_text(json.dumps(GEMMA_4_26B_A4B), encoding="utf-8")
        model = str(tmp_path)
    config = RunConfig.model_validate(
        {
            "model": {"path": model, "weights": "random"},
            "adapt": {"lora": {"rank": 16, "alpha": 16, "targets": ["attention", "experts"]}},
            "optimizer": {"name": "adamw8bit"},
            "train": {"accumulate": 1, **train},
        }
    )
    tokens = config.train.micro_batch * config.train.sequence_length
    found = duration(trace(resolve(config, "cuda"), gpu=find_gpu(gpu)).work, tokens, find_gpu(gpu))
    assert found is not None
    speed = found.tokens_per_second
    assert speed.slow <= published[0] <= published[1] <= speed.fast, speed
    assert speed.fast < 7 * speed.slow, "a range that says nothing"
