"""Adapters of stock PEFT load into an adapted model; what does not fit is named and changes nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moetune.adapt.start_from.peft_adapter import load_peft
from moetune.errors import UserError
from moetune.exporting.export import export
from tests.exporting.runs import ToyRun
from tests.exporting.writers.test_peft import LORA, assert_same, logits, make_run
from tests.reference import excite_, token_ids

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def make_stock(run: ToyRun, folder: Path, **settings: Any) -> PeftModel:
    """An adapter that stock PEFT made on the plain model, with factors that act."""
    targets = {"target_modules": ATTENTION, "target_parameters": STACKS}
    config = LoraConfig(**({"r": LORA["rank"], "lora_alpha": LORA["alpha"]} | targets | settings))
    torch.manual_seed(4)
    plain = AutoModelForCausalLM.from_pretrained(run.base, dtype=torch.float32)
    model = get_peft_model(plain, config).eval()
    excite_(model)
    model.save_pretrained(folder)
    return model


LOADED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": ("mixtral", {"lora": LORA}, {}),
    "qwen2_moe": ("qwen2_moe", {"lora": LORA}, {}),
    "gpt_oss": ("gpt_oss", {"lora": LORA}, {}),
    "saved routers, another scaling": (
        "mixtral", {"router": "all", "lora": LORA | {"rank": 4, "alpha": 4}},
        {"r": 4, "lora_alpha": 2, "use_rslora": True, "modules_to_save": ["mlp.gate"]},
    ),
    "a head saved with its base weight": (
        "mixtral", {"lora": LORA | {"targets": ["attention", "lm_head"]}},
        {"target_modules": [*ATTENTION, "lm_head"], "target_parameters": None},
    ),
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", LOADED)
def test_an_adapter_of_stock_peft_loads(case: str, tmp_path: Path) -> None:
    model_type, adapt, settings = LOADED[case]
    run = make_run(model_type, tmp_path, adapt)
    made = make_stock(run, tmp_path / "stock", **settings)
    if "head" in case:
        saved = load_file(tmp_path / "stock" / "adapter_model.safetensors")
        assert "base_model.model.lm_head.base_layer.weight" in saved
    adapted = run.fresh()
    load_peft(adapted, tmp_path / "stock")
    assert_same(logits(adapted.model), logits(made))
    adapted.model(input_ids=token_ids(), labels=token_ids()).loss.backward()
    assert all(parameter.grad is not None for parameter in adapted.trainable().values())


@pytest.fixture(scope="module")
def stock_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[ToyRun, Path]:
    folder = tmp_path_factory.mktemp("stock")
    run = make_run("mixtral", folder, {"lora": LORA})
    make_stock(run, folder / "stock")
    return run, folder / "stock"


MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"rank": 2}, r"q_proj: rank 3, and adapt\.lora asks for 2"),
    "rank and alpha": ({"rank": 4}, r"q_proj: alpha / rank is 2\.5, and adapt\.lora asks for 1\.875"),
    "alpha": ({"alpha": 6}, r"experts\.gate_up_proj: alpha / rank is 2\.5, and adapt\.lora asks for 2\n"),
    "split": ({"gate_up": "split"}, r"gate_up_proj: gate and up share factors; set .* fused, rank: 3 and alpha: 7\.5"),
    "layers": ({"layers": [0]}, r"model\.layers\.1\.self_attn\.q_proj: has factors; adapt\.lora leaves it out"),
    "ids": ({"ids": [0, 1]}, r"layers\.0\.mlp\.experts\.gate_up_proj: expert 2 has factors; adapt\.lora leaves it out"),
    "more": ({"targets": ["attention", "experts", "lm_head"]}, r"lm_head: has no factors; leave it out of adapt\.lora"),
    "less": ({"targets": ["experts"]}, r"k_proj: has factors; adapt\.lora leaves it out"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_mismatch_is_named_and_changes_nothing(kind: str, stock_run: tuple[ToyRun, Path]) -> None:
    run, adapter = stock_run
    changed, message = MISMATCHES[kind]
    adapted = run.fresh(**changed)
    before = {name: parameter.clone() for name, parameter in adapted.trainable().items()}
    with pytest.raises(UserError, match=message):
        load_peft(adapted, adapter)
    assert all(parameter.equal(before[name]) for name, parameter in adapted.trainable().items())


def test_experts_that_share_their_factors_are_not_taken_for_split_ones(tmp_path: Path) -> None:
    run = make_run("mixtral", tmp_path, {"lora": LORA | {"targets": ["experts"], "gate_up": "split"}})
    both = {"rank_pattern": {"gate_up_proj": 2 * 3}, "alpha_pattern": {"gate_up_proj": 2 * 7.5}}
    make_stock(run, tmp_path / "stock", target_modules=[], **both)
    with pytest.raises(UserError, match=r"share factors; set adapt\.lora\.gate_up: fused, rank: 6 and alpha: 15"):
        load_peft(run.fresh(), tmp_path / "stock")


def test_fewer_experts_than_chosen_are_named(tmp_path: Path) -> None:
    run = make_run("mixtral", tmp_path, {"lora": LORA | {"ids": [0, 1]}})
    export(run.path, "peft", tmp_path / "adapter")
    with pytest.raises(UserError, match=r"expert 2 has no factors; leave it out of adapt\.lora\.ids"):
        load_peft(run.fresh(ids="all"), tmp_path / "adapter")


def test_a_router_on_one_side_only_is_named(stock_run: tuple[ToyRun, Path], tmp_path: Path) -> None:
    run = make_run("mixtral", tmp_path, {"router": [0], "lora": LORA})
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.gate\.weight: is not in the adapter"):
        load_peft(run.fresh(), stock_run[1])
    export(run.path, "peft", tmp_path / "adapter")
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.gate\.weight: is in the adapter; it is frozen here"):
        load_peft(stock_run[0].fresh(), tmp_path / "adapter")
