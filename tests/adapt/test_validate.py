"""What stays frozen is in base precision, every tensor where the run file says; other models are refused by name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import nn

from moetune.adapt.build import Adapted
from moetune.adapt.validate import refuse_misplaced, refuse_unquantized
from moetune.errors import UserError
from moetune.experts.bank import ExpertBank
from moetune.experts.host import mark_on_host, stays_on_host
from moetune.experts.quantized import QuantizedExperts, QuantizedLinear
from moetune.models.structure import meta_model, read_structure
from moetune.run.validation import unsupported_experts
from tests.experts.test_host import toy
from tests.reference import build_toy, small_linears_are_quantized
from tests.toys import toy_config, toy_model

LORA = {"rank": 2, "alpha": 4, "targets": ["attention", "experts"]}
CPU = torch.device("cpu")


def quantized(folder: Path, model_type: str = "mixtral", adapt: Any = None, **model: Any) -> Adapted:
    with small_linears_are_quantized():
        return build_toy(toy_config(model_type), folder, adapt or {"router": "all"}, model=model)


def check(adapted: Adapted, base: str = "nf4") -> None:
    config = adapted.run.config
    wanted = config.model_copy(update={"model": config.model.model_copy(update={"base": base})})
    with small_linears_are_quantized():
        refuse_unquantized(adapted.model, replace(adapted.run, config=wanted))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("base", "kind"), [("nf4", Linear4bit), ("int8", QuantizedLinear), ("bf16", QuantizedLinear), ("fp32", nn.Linear)]
)
def test_every_frozen_linear_of_a_layer_is_quantized(base: str, kind: type, tmp_path: Path) -> None:
    """Where base and compute precision agree, it stays as it is."""
    adapted = quantized(tmp_path, "qwen2_moe", base=base)
    model = adapted.model.model
    for path in ("self_attn.q_proj", "self_attn.o_proj", "mlp.shared_expert.up_proj"):
        assert type(model.layers[1].get_submodule(path)) is kind, path
    assert type(adapted.model.lm_head) is nn.Linear
    assert type(model.layers[1].mlp.shared_expert_gate) is nn.Linear  # one row: nothing to gain
    check(adapted, base)


def test_what_trains_in_full_is_not_quantized(tmp_path: Path) -> None:
    adapted = quantized(tmp_path, adapt={"also": ["model.layers.1.self_attn.*"]})
    assert type(adapted.model.model.layers[1].self_attn.q_proj) is nn.Linear
    assert isinstance(adapted.model.model.layers[2].self_attn.q_proj, Linear4bit)


EXPERTS = "model.layers.3.mlp.experts"


def plain_base(adapted: Adapted) -> None:
    adapted.model.model.layers[2].self_attn.v_proj.base_layer = nn.Linear(32, 16, bias=False)


def other_stack(name: str) -> Callable[[Adapted], None]:
    def change(adapted: Adapted) -> None:
        bank = adapted.model.get_submodule(EXPERTS)
        old = getattr(bank, name)
        setattr(bank, name, QuantizedExperts(old.count, old.shape, "bf16"))

    return change


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda a: a.model.set_submodule("model.layers.2.self_attn.v_proj", nn.Linear(32, 16, bias=False)),
            r"model\.layers\.2\.self_attn\.v_proj: should be stored as nf4 and is not",
        ),
        (plain_base, r"model\.layers\.2\.self_attn\.v_proj: should be stored as nf4 and is not"),
        (
            lambda a: a.model.set_submodule(
                "model.layers.0.self_attn.q_proj", Linear4bit(32, 32, bias=False, quant_type="nf4")
            ),
            r"layers\.0\.self_attn\.q_proj: should be stored as nf4",
        ),
        (
            lambda a: a.model.set_submodule(EXPERTS, toy_model("mixtral").get_submodule(EXPERTS)),
            r"layers\.3\.mlp\.experts: 8 experts should be stored as nf4 and are not",
        ),
        (other_stack("gate_up"), r"layers\.3\.mlp\.experts: 8 experts should be stored as nf4"),
        (other_stack("down"), r"layers\.3\.mlp\.experts: 8 experts should be stored as nf4"),
    ],
    ids=["a linear", "a linear under LoRA", "never quantized", "experts", "gate_up", "down"],
)
def test_what_is_not_in_base_precision_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    adapted = quantized(tmp_path, adapt={"router": "all", **({"lora": LORA} if change is plain_base else {})})
    check(adapted)
    change(adapted)
    with pytest.raises(UserError, match=message):
        check(adapted)


def test_a_bank_that_holds_fewer_quantized_experts_than_chosen_is_refused(tmp_path: Path) -> None:
    adapted = quantized(tmp_path / "some", adapt={"experts": {"layers": [3], "ids": [1]}})
    other = quantized(tmp_path / "all")
    other.model.set_submodule(EXPERTS, adapted.model.get_submodule(EXPERTS))
    with pytest.raises(UserError, match=r"layers\.3\.mlp\.experts: 8 experts should be stored as nf4 and are not"):
        check(other)


@pytest.mark.parametrize("skipped", ["install", "put_linear"])
def test_a_build_that_leaves_them_out_fails(skipped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"moetune.adapt.weights.target.LoadTarget.{skipped}", lambda *args: None)
    with pytest.raises(UserError, match=r"should be stored as nf4 and (are|is) not"):
        quantized(tmp_path)


def test_experts_with_a_norm_after_them_are_refused() -> None:
    model = meta_model(toy_config("mixtral"))
    structure = read_structure(model)
    model.get_submodule(EXPERTS).has_post_expert_norm = True
    (problem,) = unsupported_experts(model, structure)
    assert problem == f"{EXPERTS}: experts with a norm after them can be counted but not trained yet"


# --- Places ---------------------------------------------------------------------------------------------------------


def stacks(adapted: Adapted) -> list[QuantizedExperts]:
    return [module for module in adapted.model.modules() if isinstance(module, QuantizedExperts)]


def test_what_is_quantized_is_on_the_host_and_stays_there(tmp_path: Path) -> None:
    adapted = toy(tmp_path, "gpt_oss", "all three ways", checkpointing="none")
    adapted.model.to(torch.float64)
    assert all(stays_on_host(buffer) for stack in stacks(adapted) for buffer in stack.buffers())
    bank = next(module for module in adapted.model.modules() if isinstance(module, ExpertBank))
    assert not any(stays_on_host(parameter) for parameter in adapted.model.parameters())
    assert not stays_on_host(bank.gate_up_bias)


def left_host(adapted: Adapted) -> None:
    stacks(adapted)[0].data = stacks(adapted)[0].data.clone()


@pytest.mark.parametrize(
    ("experts_on", "change", "message"),
    [
        (
            "host",
            lambda a: mark_on_host(a.model.get_parameter("model.layers.1.mlp.gate.weight")),
            r"layers\.1\.mlp\.gate\.weight trains and should be on cpu; it is on the host",
        ),
        ("host", left_host, r"experts_on: host, but model\.layers\.0\.mlp\.experts\.gate_up\.data is on"),
        (
            "gpu",
            lambda a: a.model.model.layers[0].input_layernorm.to("meta"),
            r"input_layernorm\.weight is frozen and should be on cpu; it is on meta",
        ),
    ],
    ids=["what trains", "experts", "frozen"],
)
def test_a_tensor_elsewhere_is_refused_by_name(experts_on: str, change: Any, message: str, tmp_path: Path) -> None:
    adapted = toy(tmp_path, "mixtral", "router", experts_on=experts_on, checkpointing="none")
    refuse_misplaced(adapted.model, CPU)
    change(adapted)
    with pytest.raises(UserError, match=message):
        refuse_misplaced(adapted.model, CPU)
