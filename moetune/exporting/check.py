"""Whether the merged checkpoint, in stock transformers, computes what the trained model computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from moetune.adapt.build import build, no_progress_bars
from moetune.config import HardwareConfig, ParallelConfig, RunConfig
from moetune.errors import UserError
from moetune.exporting.finished_run import FinishedRun
from moetune.run.resolve import resolve
from moetune.training.checkpoint import parts_of
from moetune.training.data import load_data

_LENGTH = 64  # tokens of a prompt, at most


@dataclass(frozen=True)
class LogitCheck:
    """How far the logits are apart: the largest difference over the largest logit, of the worst prompt."""

    prompts: int
    of: str
    max_relative_difference: float


def check_merged(run: FinishedRun, merged: Path, prompts: int) -> LogitCheck:
    """Compares on the first prompts of the run's held-out (else training) data, or on random tokens without data.

    Both models compute in float32 on the CPU, one after the other, each whole in memory. They differ by rounding to
    the checkpoint's dtype and, where the run packed its base, by the error of that packing.
    """
    config = _in_float32(run.config)
    ids, of = _prompts(run, merged, prompts)
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
    differences = [((f - e).abs().max() / e.abs().max()).item() for f, e in zip(found, expected, strict=True)]
    return LogitCheck(len(ids), of, max(differences))


def _trained_logits(run: FinishedRun, config: RunConfig, ids: list[Tensor]) -> list[Tensor]:
    adapted = build(resolve(config, "cpu"), "cpu")
    for parameter, parts in parts_of(adapted).items():
        for part in parts:
            mine = part.of(parameter)
            mine.copy_(run.trained[part.name].rows().reshape(mine.shape))
    adapted.model.eval()
    return [adapted.model(input_ids=row, use_cache=False).logits for row in ids]


def _prompts(run: FinishedRun, merged: Path, count: int) -> tuple[list[Tensor], str]:
    """Token ids [1, up to 64] each, and where they are from. Data that are gone by now are no reason to fail."""
    config = run.config
    if config.data is not None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(merged, trust_remote_code=False)
            data = load_data(config.data, tokenizer, config.train)
            rows = (data.train if data.eval is None else data.eval)["input_ids"][:count]
            return [torch.tensor([row[:_LENGTH]]) for row in rows], "the run's data"
        except (UserError, OSError, ValueError):
            pass
    vocabulary = run.adapted.model.config.get_text_config().vocab_size
    draw = torch.Generator().manual_seed(config.train.seed)
    return [torch.randint(vocabulary, (1, _LENGTH), generator=draw) for _ in range(count)], "random tokens"


def _in_float32(config: RunConfig) -> RunConfig:
    attention = "eager" if config.model.attention == "flash_attention_2" else config.model.attention
    model = config.model.model_copy(update={"dtype": "fp32", "attention": attention})
    train = config.train.model_copy(update={"checkpointing": "none"})
    alone = {"parallel": ParallelConfig(), "hardware": HardwareConfig()}
    return config.model_copy(update={"model": model, "train": train, **alone})
