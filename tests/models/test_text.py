"""The text of a checkpoint that also has towers: read without them, computed as the whole model does, exported to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from moetune.exporting.export import export
from moetune.models.structure import meta_model, read_structure
from tests.exporting.runs import tensors_of, write_base, write_run
from tests.reference import token_ids
from tests.thinned import thinned
from tests.toys import toy_config, toy_model

TYPES = [
    "qwen3_vl_moe", "qwen3_5_moe", "gemma4", "glm4v_moe", "ernie4_5_vl_moe", "mistral_large4", "kimi_k25", "aria",
    "minimax_m3_vl", "qwen3_omni_moe_thinker", "qwen4_exp", "dots3_note", "unlimited_ocr",
]  # fmt: skip
TOLERANCE = 1e-5
ADAPT = {"router": "1", "lora": {"rank": 2, "alpha": 5, "targets": ["attention", "experts"]}}


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=token_ids(), use_cache=False).logits


def whole(folder: Path) -> nn.Module:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("model_type", thinned(TYPES, 99))
def test_the_whole_model_computes_what_was_trained(model_type: str, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", model_type)
    run = write_run(tmp_path / "run", base, ADAPT)
    fresh, plain = run.fresh().model, whole(base)
    assert run.adapted.structure.dropped
    assert distance(logits(fresh), logits(plain)) < TOLERANCE
    expected = logits(run.adapted.model)
    assert distance(expected, logits(plain)) > 100 * TOLERANCE
    export(run.path, "merged", tmp_path / "merged")
    assert distance(logits(whole(tmp_path / "merged")), expected) < TOLERANCE
    export(run.path, "peft", tmp_path / "adapter")
    adapted = PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
    assert distance(logits(adapted), expected) < TOLERANCE
