"""What stays frozen is in base precision, and a model where it is not is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bitsandbytes.nn import Linear4bit
from torch import nn

from moetune.adapt.build import Adapted
from moetune.adapt.pack import refuse_unquantized
from moetune.errors import UserError
from moetune.experts.quantized import QuantizedExperts, QuantizedLinear
from moetune.models.structure import meta_model, read_structure
from moetune.run.linears import linears_to_quantize, read_directly
from moetune.run.validation import unsupported_experts
from tests.reference import build_toy, small_linears_are_packed
from tests.toys import toy_config, toy_model

LORA = {"rank": 2, "alpha": 4, "targets": ["attention", "experts"]}


def packed(folder: Path, model_type: str = "mixtral", adapt: dict[str, Any] | None = None, **model: Any) -> Adapted:
    with small_linears_are_packed():
        return build_toy(toy_config(model_type), folder, adapt or {"router": "all"}, model=model)


def check(adapted: Adapted, base: str = "nf4") -> None:
    config = adapted.run.config
    wanted = config.model_copy(update={"model": config.model.model_copy(update={"base": base})})
    with small_linears_are_packed():
        refuse_unquantized(adapted.model, replace(adapted.run, config=wanted))


@pytest.mark.parametrize(("base", "kind"), [("nf4", Linear4bit), ("int8", QuantizedLinear), ("bf16", QuantizedLinear)])
def test_every_frozen_linear_of_a_layer_is_packed(base: str, kind: type, tmp_path: Path) -> None:
    adapted = packed(tmp_path, "qwen2_moe", base=base)
    model = adapted.model.model
    for path in ("self_attn.q_proj", "self_attn.o_proj", "mlp.shared_expert.up_proj"):
        assert isinstance(model.layers[1].get_submodule(path), kind), path
    assert type(adapted.model.lm_head) is nn.Linear
    assert type(model.layers[1].mlp.shared_expert_gate) is nn.Linear  # one row: nothing to gain
    check(adapted, base)


def test_where_base_and_compute_precision_agree_linears_stay_as_they_are(tmp_path: Path) -> None:
    adapted = packed(tmp_path, base="fp32")
    assert type(adapted.model.model.layers[0].self_attn.q_proj) is nn.Linear


def test_what_trains_in_full_is_not_packed(tmp_path: Path) -> None:
    adapted = packed(tmp_path, adapt={"also": ["model.layers.1.self_attn.*"]})
    assert type(adapted.model.model.layers[1].self_attn.q_proj) is nn.Linear
    assert isinstance(adapted.model.model.layers[2].self_attn.q_proj, Linear4bit)


def test_small_linears_are_left_alone(tmp_path: Path) -> None:
    adapted = build_toy(toy_config("mixtral"), tmp_path, {"router": "all"})
    assert not any(isinstance(module, Linear4bit) for module in adapted.model.modules())


@pytest.mark.parametrize("lora", [None, LORA], ids=["alone", "under LoRA"])
def test_an_adapted_model_passes_and_an_unpacked_linear_is_refused(lora: Any, tmp_path: Path) -> None:
    adapted = packed(tmp_path, adapt={"router": "all", "lora": lora})
    check(adapted)
    attention = adapted.model.model.layers[2].self_attn
    if lora is None:
        attention.v_proj = nn.Linear(32, 16, bias=False)
    else:
        attention.v_proj.base_layer = nn.Linear(32, 16, bias=False)
    with pytest.raises(UserError, match=r"model\.layers\.2\.self_attn\.v_proj: should be stored as nf4 and is not"):
        check(adapted)


def test_a_4_bit_layer_that_never_was_quantized_is_refused(tmp_path: Path) -> None:
    adapted = packed(tmp_path)
    adapted.model.model.layers[0].self_attn.q_proj = Linear4bit(32, 32, bias=False, quant_type="nf4")
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.q_proj: should be stored as nf4"):
        check(adapted)


REFUSAL = r"model\.layers\.3\.mlp\.experts: 8 experts should be stored as nf4 and are not"


def test_experts_that_stayed_in_16_bit_are_refused(tmp_path: Path) -> None:
    adapted = packed(tmp_path)
    stock = toy_model("mixtral").model.layers[3].mlp.experts
    adapted.model.set_submodule("model.layers.3.mlp.experts", stock)
    with pytest.raises(UserError, match=REFUSAL):
        check(adapted)


@pytest.mark.parametrize("stack", ["gate_up", "down"])
def test_a_stack_in_another_precision_is_refused(stack: str, tmp_path: Path) -> None:
    adapted = packed(tmp_path)
    bank = adapted.model.get_submodule("model.layers.3.mlp.experts")
    old = getattr(bank, stack)
    setattr(bank, stack, QuantizedExperts(old.count, old.shape, "bf16"))
    with pytest.raises(UserError, match=REFUSAL):
        check(adapted)


def test_a_bank_that_holds_fewer_packed_experts_than_chosen_is_refused(tmp_path: Path) -> None:
    adapted = packed(tmp_path / "some", adapt={"experts": {"layers": [3], "ids": [1]}})
    other = packed(tmp_path / "all")
    bank = adapted.model.get_submodule("model.layers.3.mlp.experts")
    other.model.set_submodule("model.layers.3.mlp.experts", bank)
    with pytest.raises(UserError, match=REFUSAL):
        check(other)


@pytest.mark.parametrize("skipped", ["fill_bank", "quantize_linear"])
def test_a_build_that_leaves_them_out_fails(skipped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"moetune.adapt.build.{skipped}", lambda *args: None)
    with pytest.raises(UserError, match=r"should be stored as nf4 and (are|is) not"):
        packed(tmp_path)


def test_experts_with_a_norm_after_them_are_refused() -> None:
    model = meta_model(toy_config("mixtral"))
    structure = read_structure(model)
    model.get_submodule(structure.moe_layers[1].experts).has_post_expert_norm = True
    (problem,) = unsupported_experts(model, structure)
    assert problem == "model.layers.1.mlp.experts: experts with a norm after them can be counted but not trained yet"


# A weight that the model reads itself must stay a plain one: packed, it is bytes of another shape and dtype.


@pytest.mark.parametrize(
    ("model_type", "name", "whole", "dtype"),
    [
        ("jamba", "dt_proj", True, True),
        ("jamba", "in_proj", False, False),
        ("nemotron_h", "out_proj", True, True),
        ("granitemoehybrid", "out_proj", True, True),
        ("deepseek_v32", "weights_proj", False, True),  # casts its input to the weight's dtype
        ("deepseek_v32", "wk", False, False),
        ("mixtral", "q_proj", False, False),
    ],
)
def test_a_linear_whose_weight_is_read_is_told_and_not_packed(
    model_type: str, name: str, whole: bool, dtype: bool, tmp_path: Path
) -> None:
    sizes = {"index_n_heads": 8} if name == "weights_proj" else {}
    with small_linears_are_packed():
        adapted = build_toy(toy_config(model_type, **sizes), tmp_path, {"router": "all"})
    paths = [path for path in adapted.structure.linears("attention") if path.endswith(f".{name}")]
    assert paths
    with small_linears_are_packed():
        to_pack = linears_to_quantize(adapted.model, adapted.structure, adapted.selection)
    for path in paths:
        assert read_directly(adapted.model, path) == whole
        assert read_directly(adapted.model, path, or_its_dtype=True) == dtype
        linear = adapted.structure.linears()[path]
        worth_it = min(linear.in_features, linear.out_features) >= 8
        assert (path in to_pack) == (worth_it and not dtype)
        assert isinstance(adapted.model.get_submodule(path), Linear4bit) == (worth_it and not dtype)
