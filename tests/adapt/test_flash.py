"""Attention with sinks by torch's kernels is the model's own eager attention: values and every gradient, in float32."""

import functools

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from moetune.adapt.attention import BY_DOCUMENTS, MASKED_SINKS, VARLEN, cu_seqlens
from moetune.compat.transformers import has_sinks
from moetune.models.structure import meta_model
from tests.adapt.flash_on_cpu import flash_on_cpu  # noqa: F401  # a fixture
from tests.toys import VOCAB, causal_lm_types, toy_config, toy_model

LENGTHS = [7, 33, 24, 50, 14]
"""Documents in two rows of 64 tokens; the windows of toys are 16."""


@functools.cache
def types_with_sinks() -> tuple[str, ...]:
    found = []
    for name in causal_lm_types():
        try:
            plain = meta_model(toy_config(name))
        except Exception:  # a type that toys cannot be made of
            continue
        if has_sinks(plain):
            found.append(name)
    return tuple(found)


@pytest.mark.full
def test_transformers_has_these_types_with_sinks() -> None:
    assert types_with_sinks() == (
        "deepseek_v4", "flint", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash",
    )  # fmt: skip


UNMASKED = ("flint", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash")
MASKED = ("deepseek_v4", "hy_v4")


def sunk(model_type: str) -> PreTrainedModel:
    """A toy model in float32 whose sinks and scores are large enough that an error in one would show."""
    model = toy_model(model_type)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() > 1:
                parameter.mul_(5)
    return model


def gradients(model: PreTrainedModel, attention: str, ids: Tensor, **given: object) -> dict[str, Tensor]:
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = attention
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False, **given).logits
    logits.logsumexp(-1).sum().backward()
    return {"": logits.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert any(name.endswith("sinks") and gradient.any() for name, gradient in one.items())
    for name, expected in one.items():
        assert (expected - other[name]).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1), name


IDS = torch.randint(3, VOCAB, (2, 64), generator=torch.Generator().manual_seed(0))


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("flash_on_cpu")
@pytest.mark.parametrize("model_type", [*UNMASKED, *MASKED])
def test_whole_rows_have_the_values_and_gradients_of_eager_attention(model_type: str) -> None:
    model = sunk(model_type)
    names = [MASKED_SINKS, BY_DOCUMENTS, VARLEN] if model_type in UNMASKED else [MASKED_SINKS]
    eager = gradients(model, "eager", IDS)
    for name in names:
        assert_equal(eager, gradients(model, name, IDS))


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("flash_on_cpu")
@pytest.mark.parametrize("model_type", UNMASKED)
def test_packed_documents_have_the_values_and_gradients_of_each_alone(model_type: str) -> None:
    model, tokens = sunk(model_type), IDS.flatten()
    alone = [gradients(model, "eager", part[None]) for part in tokens.split(LENGTHS)]
    expected = {name: sum(one[name] for one in alone) for name in alone[0] if name}
    expected[""] = torch.cat([one[""] for one in alone], 1).view(2, 64, -1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).view(2, 64)
    for name in (BY_DOCUMENTS, VARLEN):
        assert_equal(expected, gradients(model, name, IDS, position_ids=positions, **cu_seqlens(LENGTHS)))
