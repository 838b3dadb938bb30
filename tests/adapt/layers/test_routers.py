"""Routers by one kernel: whose they replace, and that models stay what they are."""

import copy

import pytest
import torch
from torch import Tensor, nn

from moetune.adapt.layers.routers import fuse_routers
from tests.adapt.layers.test_rotary import fused
from tests.toys import TOP_K, toy_model

ROUTERS = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"]


def results(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The logits, and the gradient of the first router's weight."""
    router = next(module for module in model.modules() if "TopKRouter" in type(module).__name__)
    router.weight.requires_grad_()  # type: ignore[operator, union-attr]
    logits = model(ids).logits
    return logits.detach(), torch.autograd.grad(logits.square().sum(), router.weight)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("model_type", ROUTERS)
def test_a_known_model_is_what_it_was(model_type: str, normalized: bool) -> None:
    """The logits bit for bit, the router's gradient within 1e-5 of the largest."""
    torch.manual_seed(0)
    model = toy_model(model_type, norm_topk_prob=normalized).float().requires_grad_(False)
    other = copy.deepcopy(model)
    fuse_routers(model)
    assert len(fused(model)) == model.config.num_hidden_layers
    ids = torch.randint(0, 96, (2, 9))
    (logits, gradient), (of_other, expected) = results(model, ids), results(other, ids)
    assert torch.equal(logits, of_other)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_weights_have_the_dtype_that_the_models_own_have(model_type: str) -> None:
    model = toy_model(model_type).bfloat16()
    router = next(module for module in model.modules() if "TopKRouter" in type(module).__name__)
    hidden = torch.randn(7, 32, dtype=torch.bfloat16)
    expected = router(hidden)
    fuse_routers(model)
    for ours, theirs in zip(router(hidden), expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert expected[2].shape == (7, TOP_K)


@pytest.mark.parametrize("model_type", ["gpt_oss", "deepseek_v3", "glm4_moe"])
def test_another_choice_stays_the_models_own(model_type: str) -> None:
    model = toy_model(model_type)
    fuse_routers(model)
    assert not fused(model)
