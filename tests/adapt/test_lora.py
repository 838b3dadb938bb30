"""LoRA lands on exactly the linear layers that were chosen."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer

from moetune.adapt.build import Adapted
from moetune.errors import UserError
from moetune.models.routers import find_logits, logits_module
from moetune.run.dtypes import DTYPES
from moetune.run.names import is_second_factor
from moetune.training.optim.optimizers import make_optimizer
from tests.reference import excite_, run_config, small_linears_are_quantized
from tests.resolved import build
from tests.toys import toy_config

# Types whose attention, shared experts or dense layers have linears with the names that experts had in transformers 4.
TYPES = ["mixtral", "afmoe", "qwen2_moe", "deepseek_v3", "glm4_moe"]


def with_lora(model_type: str, folder: Path, *, base: str = "nf4", **lora: Any) -> Adapted:
    toy_config(model_type).save_pretrained(folder)
    adapt = {"lora": {"rank": 2, "alpha": 6, **lora}}
    with small_linears_are_quantized():
        return build(run_config(folder, adapt, model={"base": base}), "cpu")


def on(adapted: Adapted) -> set[str]:
    return {name for name, module in adapted.model.named_modules() if isinstance(module, LoraLayer)}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("model_type", "component"),
    [
        *((model_type, component) for model_type in TYPES for component in ("attention",)),
        *((model_type, "lm_head") for model_type in TYPES[::3]),
        *((model_type, "shared_experts") for model_type in TYPES if model_type != "mixtral"),
        *((model_type, "dense_mlp") for model_type in ("afmoe", "deepseek_v3", "glm4_moe")),
    ],
)
def test_every_linear_of_a_component_and_no_other(model_type: str, component: Any, tmp_path: Path) -> None:
    adapted = with_lora(model_type, tmp_path, targets=[component])
    assert on(adapted) == adapted.structure.linears(component).keys()
    assert all(".lora_" in name for name in adapted.trainable())


def test_one_shared_projection_of_one_layer(tmp_path: Path) -> None:
    adapted = with_lora("deepseek_v3", tmp_path, targets=["model.layers.2.mlp.shared_experts.gate_proj"])
    assert on(adapted) == {"model.layers.2.mlp.shared_experts.gate_proj"}


@pytest.mark.parametrize(("base", "dtype"), [("nf4", "fp32"), ("int8", "bf16"), ("bf16", "fp32"), ("fp32", "bf16")])
def test_factors_have_their_dtype_are_scaled_and_without_effect_at_first(base: str, dtype: str, tmp_path: Path) -> None:
    adapted = with_lora("mixtral", tmp_path, base=base, targets=["q_proj"], dtype=dtype)
    for path in on(adapted):
        module = adapted.model.get_submodule(path)
        assert module.scaling["default"] == 3.0
        A, B = module.lora_A["default"].weight, module.lora_B["default"].weight
        assert A.dtype == B.dtype == DTYPES[dtype]
        assert A.shape == (2, 32)
        assert 0 < A.abs().max() <= 1 / math.sqrt(32)
        assert not B.any()


@pytest.mark.parametrize(("model_type", "name"), [("jamba", "dt_proj"), ("nemotron_h", "out_proj")])
def test_lora_that_would_have_no_effect_is_refused(model_type: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"adapt\.lora: the model reads the weight of .*\.{name}"):
        with_lora(model_type, tmp_path, targets=[name])


def test_an_adapter_that_is_switched_off_adds_nothing(tmp_path: Path) -> None:
    adapted = with_lora("mixtral", tmp_path, targets=["q_proj"])
    excite_(adapted.model)
    layer = adapted.model.get_submodule(next(iter(on(adapted))))
    x = torch.randn(3, layer.in_features)
    assert not layer(x).equal(layer.base_layer(x))
    layer.enable_adapters(False)
    assert layer(x).equal(layer.base_layer(x))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "phimoe", "gemma4_text"])
def test_a_router_computes_with_its_update_and_its_logits_have_it(model_type: str, tmp_path: Path) -> None:
    """Routers of three kinds: a class of its own, a linear layer that returns a tuple, and one that holds a linear
    layer. The factors' gradients are those that W + s·B·A passes on."""
    adapted = with_lora(model_type, tmp_path, base="fp32", targets=["router"])
    layer, model = adapted.structure.moe_layers[-1], adapted.model
    (path,) = (one for one in on(adapted) if one.startswith(layer.router))
    excite_(model)
    wrapper, experts = model.get_submodule(path), layer.shape.num_experts
    x = torch.randn(6, wrapper.in_features)
    A, B = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
    weight = (wrapper.base_layer.weight + 3 * B @ A).detach().requires_grad_()
    seen: list[Any] = []
    hook = logits_module(model, layer.router, experts).register_forward_hook(lambda *of: seen.append(of[2]))
    model.get_submodule(layer.router)(x)
    hook.remove()
    logits, mix = find_logits(seen[0], experts), torch.randn(6, experts)
    assert logits is not None
    (logits * mix).sum().backward()
    if model_type == "gemma4_text":  # which normalizes the states first
        assert not logits.equal(wrapper.base_layer(x))
    else:
        expected = x @ weight.T
        torch.testing.assert_close(logits, expected)
        (expected * mix).sum().backward()
        torch.testing.assert_close(A.grad, 3 * B.T @ weight.grad)
        torch.testing.assert_close(B.grad, 3 * weight.grad @ A.T)
    wrapper.enable_adapters(False)
    assert not find_logits(model.get_submodule(layer.router)(x), experts).equal(logits)


def test_rank_stabilized_factors_have_the_root_of_the_rank(tmp_path: Path) -> None:
    adapted = with_lora("mixtral", tmp_path, rslora=True)
    bank = adapted.model.get_submodule(adapted.structure.moe_layers[0].experts)
    assert bank.lora.scale == pytest.approx(6 / math.sqrt(2))
    for path in on(adapted):
        assert adapted.model.get_submodule(path).scaling["default"] == pytest.approx(6 / math.sqrt(2))


def test_dropout_is_that_of_a_gpu_and_of_linear_layers_only(tmp_path: Path) -> None:
    adapted = with_lora("mixtral", tmp_path, targets=["attention"], dropout=0.25)
    x = torch.ones(64, 64, requires_grad=True)
    for path in on(adapted):
        dropout = adapted.model.get_submodule(path).lora_dropout["default"]
        out = dropout.train()(x)
        assert out.unique().tolist() == [0.0, pytest.approx(4 / 3)]
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], out.detach())
        assert dropout.eval()(x) is x
    for targets, what in ((["attention", "experts"], "experts"), (["router"], r"the weight of .*mlp\.gate")):
        with pytest.raises(UserError, match=f"dropout: PEFT has none for the factors of {what}"):
            with_lora("mixtral", tmp_path, dropout=0.25, targets=targets)


def test_the_second_factor_has_a_learning_rate_of_its_own(tmp_path: Path) -> None:
    adapted = with_lora("mixtral", tmp_path, lr_ratio=16.0)
    names = {id(parameter): name for name, parameter in adapted.trainable().items()}
    rates = {names[id(p)]: group["lr"] for group in make_optimizer(adapted).param_groups for p in group["params"]}
    assert rates.keys() == adapted.trainable().keys()
    first = adapted.run.optimizers["lora"].lr
    assert rates == {name: first * (16 if is_second_factor(name) else 1) for name in rates}
    assert {name.rpartition("lora_")[2][:1] for name in rates if "lora_" in name and is_second_factor(name)} == {"B"}
