"""Stock PEFT with an exported adapter on the plain model computes what was trained, and the adapter comes back."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from moetune.adapt.start_from.peft_adapter import load_peft
from moetune.errors import UserError
from moetune.exporting.export import export
from moetune.exporting.finished_run import open_run
from moetune.exporting.writers.adapter import write_peft
from moetune.training.folder.checkpoint import TRAINED_FILE
from tests.exporting.runs import ToyRun, trained_of, write_base, write_run
from tests.reference import token_ids
from tests.resolved import write_quantized_base
from tests.thinned import thinned

LORA = {"rank": 3, "alpha": 7.5}
ALL = ["attention", "experts"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"lora": LORA}),
    "mixtral split": ("mixtral", {"lora": LORA | {"gate_up": "split"}}),
    "mixtral, shared": ("mixtral", {"lora": LORA | {"share": "outer", "ids": [1, 2, 5]}}),
    "gpt_oss split, shared, in bf16": (
        "gpt_oss", {"lora": LORA | {"gate_up": "split", "share": "outer", "dtype": "bf16"}},
    ),
    "mixtral in bf16": ("mixtral", {"lora": LORA | {"dtype": "bf16"}}),
    "experts alone": ("mixtral", {"lora": LORA | {"targets": ["experts"], "gate_up": "split"}}),
    "attention alone": ("mixtral", {"lora": LORA | {"targets": ["attention"], "layers": [1]}}),
    "one layer, three experts": ("mixtral", {"lora": LORA | {"layers": [1], "ids": [0, 3, 6], "gate_up": "split"}}),
    "router and norms": ("mixtral", {"router": "all", "also": ["norm"], "lora": LORA}),
    "embedding and head": ("mixtral", {"also": ["*embed_tokens*", "lm_head"], "lora": LORA}),
    "qwen2_moe": ("qwen2_moe", {"router": "all", "lora": LORA | {"targets": [*ALL, "shared_experts"]}}),
    "qwen2_moe, a shared projection": (
        "qwen2_moe", {"lora": LORA | {"targets": ["q_proj", "model.layers.1.mlp.shared_expert.up_proj"]}},
    ),
    # PEFT renames the shared experts of laguna on loading, as it would a checkpoint's
    "laguna": ("laguna", {"lora": LORA | {"targets": [*ALL, "shared_experts"]}}),
    "gpt_oss": ("gpt_oss", {"router": "all", "lora": LORA}),
    "gpt_oss split": ("gpt_oss", {"lora": LORA | {"gate_up": "split", "ids": [1, 2, 5]}}),
    "llama4_text": ("llama4_text", {"router": "all", "lora": LORA}),
    "llama4_text split": ("llama4_text", {"lora": LORA | {"gate_up": "split", "ids": [1, 2, 5]}}),
    "gpt_oss, part of a router": ("gpt_oss", {"also": ["*router.weight"], "lora": LORA}),
    "deepseek_v2": (
        "deepseek_v2", {"router": "all", "lora": LORA | {"targets": [*ALL, "shared_experts", "dense_mlp"]}},
    ),
    "mixtral, a rank for each": ("mixtral", {"lora": LORA | {"rank": {"attention": 5, "experts": 2}}}),
    "mixtral split, a rank for each layer": (
        "mixtral",
        {"lora": LORA | {"rank": {"attention": 2, "experts": {"0": 3, 1: 4}}, "gate_up": "split", "rslora": True}},
    ),
    "mixtral, factors on routers": ("mixtral", {"lora": LORA | {"targets": [*ALL, "router"]}}),
    "gpt_oss, factors on routers": (
        "gpt_oss", {"lora": LORA | {"rank": {"attention": 3, "router": 2}, "targets": ["attention", "router"]}},
    ),
    "phimoe, factors on routers": ("phimoe", {"lora": LORA | {"targets": ["attention", "router"]}}),
    "deepseek_v3, a buffer in the router": ("deepseek_v3", {"router": "all", "lora": LORA}),
}  # fmt: skip


def make_run(model_type: str, folder: Path, adapt: dict[str, Any], **sizes: Any) -> ToyRun:
    return write_run(folder / "run", write_base(folder / "base", model_type, num_hidden_layers=2, **sizes), adapt)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=token_ids(), use_cache=False).logits


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).norm() <= 1e-4 * expected.norm()


def stock(base: Path, adapter: Path) -> PeftModel:
    """Load as a user would. Nothing but PEFT's remark on patterns for parameters, which it does use, may be said."""
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = PeftModel.from_pretrained(plain, str(adapter)).eval()
    others = [str(one.message) for one in said if "did not match any targeted module" not in str(one.message)]
    assert not [text for text in others if "adapter" in text or "target" in text], others
    return model


def check_export(run: ToyRun, adapter: Path) -> PeftModel:
    """Export, and compare logits; what trained must matter."""
    export(run.path, "peft", adapter)
    model, expected = stock(run.base, adapter), logits(run.adapted.model)
    assert_same(logits(model), expected)
    with model.disable_adapter():
        assert (expected - logits(model)).norm() > 1e-2 * expected.norm()
    again = run.fresh()
    load_peft(again, adapter)
    assert logits(again.model).equal(expected)
    trained = run.adapted.trainable()
    assert all(parameter.equal(trained[name]) for name, parameter in again.trainable().items())
    return model


@pytest.mark.one_in(12)
@pytest.mark.parametrize("case", thinned(CASES, 2))
def test_stock_peft_computes_the_same_and_the_adapter_comes_back(case: str, tmp_path: Path) -> None:
    run = make_run(CASES[case][0], tmp_path, CASES[case][1])
    model = check_export(run, tmp_path / "adapter")
    selection, layers = run.adapted.selection, run.adapted.structure.moe_layers
    experts = {layer.experts for layer in layers if layer.index in selection.lora_experts}
    adapted = {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    names = {name.removeprefix("base_model.model.").removesuffix(".base_layer") for name in adapted}
    assert names == {*selection.lora_linears, *experts}


def test_a_tied_embedding_is_saved_under_both_names(tmp_path: Path) -> None:
    run = make_run("mixtral", tmp_path, {"also": ["*embed_tokens*"], "lora": LORA}, tie_word_embeddings=True)
    model = check_export(run, tmp_path / "adapter").base_model.model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_an_adapter_of_a_quantized_base_names_the_checkpoint_that_was_quantized(
    base: Callable[[str], Path], tmp_path: Path
) -> None:
    """PEFT loads this one, and not the quantized base; neither is replaced."""
    original, packed = base("mixtral"), tmp_path / "packed"
    write_quantized_base(str(original), packed, "nf4", True)
    run = write_run(tmp_path / "run", original, {"lora": LORA})
    file = run.path / "run.yaml"
    file.write_text(file.read_text().replace(str(original), str(packed)))
    export(run.path, "peft", tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(original.resolve())
    for folder in (original, packed):
        with pytest.raises(UserError, match="holds what is being exported"):
            export(run.path, "peft", folder, overwrite=True)


def assert_holds(adapted: Any, file: Path) -> None:
    found, saved = trained_of(adapted), load_file(file)
    assert found.keys() == saved.keys()
    assert all(tensor.equal(saved[name]) for name, tensor in found.items())


def test_a_checkpoint_that_comes_later_is_not_what_was_opened(tmp_path: Path) -> None:
    run = make_run("mixtral", tmp_path, {"lora": LORA})
    opened = open_run(run.path)
    write_run(tmp_path / "later", run.base, {"lora": LORA}, steps=(8, 9))
    (tmp_path / "later" / "checkpoints" / "step-9").rename(run.path / "checkpoints" / "step-9")
    (tmp_path / "adapter").mkdir()
    write_peft(opened, tmp_path / "adapter")
    again = run.fresh()
    load_peft(again, tmp_path / "adapter")
    assert opened.step == 7
    assert_holds(again, run.path / "checkpoints" / "step-7" / TRAINED_FILE)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("model_type", "adapt", "message", "format_"),
    [
        ("mixtral", {"router": "1"}, "has no adapt.lora", "vllm"),
        ("mixtral", {"lora": LORA, "router": "1"}, "trains model.layers.1.mlp.gate.weight beside LoRA", "vllm"),
        ("qwen2_moe", {"router": "all"}, r"has no adapt\.lora.*--format delta or merged", "peft"),
        (
            "qwen2_moe", {"experts": {"layers": [0], "ids": [1]}, "lora": LORA},
            r"layer 0 train whole.*--format delta or merged", "peft",
        ),
        (
            "qwen2_moe", {"also": ["*q_proj.bias"], "lora": LORA},
            r"parameters of 'model\.layers\.0\.self_attn\.q_proj' train in full.*--format delta or merged", "peft",
        ),
    ],
)  # fmt: skip
def test_what_an_adapter_cannot_hold_is_refused(
    model_type: str, adapt: dict[str, Any], message: str, format_: Any, tmp_path: Path
) -> None:
    run = make_run(model_type, tmp_path, adapt)
    with pytest.raises(UserError, match=message):
        export(run.path, format_, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
