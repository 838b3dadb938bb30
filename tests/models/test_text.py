"""The text of a checkpoint that also has towers: read without them, computed and exported as of the whole model."""

import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moetune.errors import UserError
from moetune.exporting.export import export
from moetune.models.text import auto_class
from moetune.tensor_files import Stored
from moetune.training.data.load import refuse_unknown_tokens
from tests import toys
from tests.exporting.runs import tensors_of, write_base, write_run
from tests.reference import run_config, token_ids
from tests.resolved import build
from tests.toys import marked_types

CATALOG = Path(__file__).parents[2] / "docs" / "reference" / "catalog.md"
TYPES = [
    "qwen3_vl_moe", "qwen3_5_moe", "gemma4", "glm4v_moe", "ernie4_5_vl_moe", "mistral_large4", "kimi_k25", "aria",
    "minimax_m3_vl", "qwen3_omni_moe_thinker", "qwen4_exp", "dots3_note", "unlimited_ocr", "step3p7",
    "glm5_next",
]  # fmt: skip
TOLERANCE = 1e-5
TOWERS = ("vis", "audio", "projector", "merger", "multi_modal", "sam_")
NOT_IN_PEFT = ("mistral_large4", "unlimited_ocr")
"""Types of which PEFT renames the factors when it loads an adapter; its own adapters too."""
ADAPT = {"router": "1", "lora": {"rank": 2, "alpha": 5, "targets": ["attention", "experts"]}}


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=token_ids(), use_cache=False).logits


def whole(folder: Path) -> nn.Module:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def distance(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.full
@pytest.mark.parametrize("model_type", TYPES)
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
    before, after = tensors_of(base), tensors_of(tmp_path / "merged")
    assert before.keys() == after.keys()
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed
    assert not [name for name in changed if any(word in name for word in TOWERS)]
    if model_type in NOT_IN_PEFT:
        with pytest.raises(UserError, match="PEFT would not load this adapter"):
            export(run.path, "peft", tmp_path / "adapter")
        return
    export(run.path, "peft", tmp_path / "adapter")
    adapted = PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
    assert distance(logits(adapted), expected) < TOLERANCE


@pytest.mark.full
def test_experts_that_the_hub_stores_transposed_go_back_transposed(tmp_path: Path) -> None:
    """Qwen3-VL-MoE is published with [E, in, out]; transformers saves [E, out, in], and reads both."""
    base = write_base(tmp_path / "base", "qwen3_vl_moe")
    stored = {k: t.mT.contiguous() if ".experts." in k else t for k, t in tensors_of(base).items()}
    save_file(stored, base / "model.safetensors", metadata={"format": "pt"})
    run = write_run(tmp_path / "run", base, ADAPT | {"experts": {"layers": "0", "ids": [1, 5]}})
    expected = logits(run.adapted.model)
    assert distance(logits(run.fresh().model), logits(whole(base))) < TOLERANCE
    export(run.path, "merged", tmp_path / "merged")
    assert {k: t.shape for k, t in tensors_of(tmp_path / "merged").items()} == {k: t.shape for k, t in stored.items()}
    assert distance(logits(whole(tmp_path / "merged")), expected) < TOLERANCE


def test_no_tensor_of_a_tower_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write_base(tmp_path / "base", "qwen3_5_moe")
    sizes = {name: tensor.numel() for name, tensor in tensors_of(base).items()}
    rows, read = Stored.rows, []

    def noted(self: Stored, *args: Any, **more: Any) -> Tensor:
        found = rows(self, *args, **more)
        read.append(found.numel())
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Stored, "rows", noted)
        build(run_config(base, ADAPT, model={"weights": "pretrained", "base": "fp32", "dtype": "fp32"}), "cpu")
    assert sum(read) == sum(count for name, count in sizes.items() if "visual" not in name)


@pytest.mark.full
def test_the_list_of_types_is_what_transformers_has() -> None:
    listed = [
        set(re.findall(r"`(\w+)`", part))
        for part in CATALOG.read_text().partition("## Model types")[2].partition("\n## ")[0].split("- **")[1:]
    ]
    found: list[set[str]] = [set(), set(), set()]
    for name in marked_types():
        config = CONFIG_MAPPING[name]()
        found[2 if auto_class(config) is None else int("text_config" in config.sub_configs)].add(name)
    assert listed == found


def test_a_token_that_stands_for_an_image_is_refused() -> None:
    settings = toys.toy_config("qwen3_vl_moe", image_token_id=50)
    text, images = (datasets.Dataset.from_dict({"input_ids": [[5, 6], [7, last]]}) for last in (8, 50))
    refuse_unknown_tokens(settings, "model", 0, text, None)
    with pytest.raises(UserError, match="hold token 50, which stands for image input"):
        refuse_unknown_tokens(settings, "model", 0, text, images)
