"""Whether the merged checkpoint, in stock transformers, computes what the trained model computes."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from moetune.adapt.build import build, no_progress_bars
from moetune.config import RunConfig
from moetune.export.finished_run import FinishedRun
from moetune.train.trainer import TRAINED_FILE

_LENGTH = 64  # tokens of a prompt


def check_merged(run: FinishedRun, merged: Path, prompts: int) -> float:
    """The largest difference of a logit over the largest logit, the worst of `prompts` prompts of random tokens.

    Both models compute in float32 on the CPU, one after the other, each whole in memory. What they differ by is
    rounding, and, where the run packed its base, the error of that packing.
    """
    config = _in_float32(run.config)
    ids = _prompts(run, prompts)
    with torch.no_grad():
        expected = _trained_logits(run, config, ids)
        with no_progress_bars():
            stock = AutoModelForCausalLM.from_pretrained(
                merged,
                dtype=torch.float32,
                attn_implementation=config.model.attention,
                use_safetensors=True,
                trust_remote_code=False,
            )
        found = [stock.eval()(input_ids=row, use_cache=False).logits for row in ids]
    differences = [(f - e).abs().max() / e.abs().max() for f, e in zip(found, expected, strict=True)]
    return max(difference.item() for difference in differences)


def _trained_logits(run: FinishedRun, config: RunConfig, ids: list[Tensor]) -> list[Tensor]:
    adapted = build(config, "cpu")
    saved = load_file(run.checkpoint / TRAINED_FILE)
    for name, parameter in adapted.trainable().items():
        parameter.copy_(saved[name])
    adapted.model.eval()
    return [adapted.model(input_ids=row, use_cache=False).logits for row in ids]


def _prompts(run: FinishedRun, count: int) -> list[Tensor]:
    """Token ids [1, 64] each, drawn from the run's seed."""
    vocabulary = run.adapted.model.config.get_text_config().vocab_size
    draw = torch.Generator().manual_seed(run.config.train.seed)
    return [torch.randint(vocabulary, (1, _LENGTH), generator=draw) for _ in range(count)]


def _in_float32(config: RunConfig) -> RunConfig:
    model = config.model.model_copy(update={"dtype": "fp32"})
    train = config.train.model_copy(update={"checkpointing": "none"})
    return config.model_copy(update={"model": model, "train": train})
