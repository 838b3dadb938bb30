"""Rotation and norms of heads by one kernel: which attention layers run it, and that models stay what they are."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moetune.adapt.layers.norms import fuse_norms
from moetune.adapt.layers.rotary import fuse_rotary
from tests.toys import toy_model


def fused(model: nn.Module) -> list[nn.Module]:
    """The modules whose forward method was replaced."""
    return [module for module in model.modules() if "forward" in vars(module)]


def results(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The logits, and the gradient of the embedded tokens."""
    rows = model.get_input_embeddings()(ids).detach().requires_grad_()  # type: ignore[operator]
    logits = model(inputs_embeds=rows).logits
    return logits.detach(), torch.autograd.grad(logits.square().sum(), rows)[0]


ROTATED = {"mixtral": 1, "qwen2_moe": 1, "qwen3_moe": 3, "olmoe": 1, "deepseek_v3": 1}
"""Model type -> modules of a layer with a replaced forward method: attention, and the norms of its heads."""


@pytest.mark.parametrize("model_type", ROTATED)
def test_a_known_model_is_bit_for_bit_what_it_was(model_type: str) -> None:
    torch.manual_seed(0)
    model = toy_model(model_type).float().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            nn.init.normal_(parameter)
    other = copy.deepcopy(model)
    fuse_rotary(model)
    assert len(fused(model)) == ROTATED[model_type] * model.config.num_hidden_layers
    ids = torch.randint(0, 96, (2, 9))
    for ours, theirs in zip(results(model, ids), results(other, ids), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert model_type == "qwen3_moe" or torch.equal(ours, theirs)


@pytest.mark.parametrize("model_type", ["gpt_oss", "glm4_moe", "deepseek_v2"])
def test_another_rotation_stays_the_models_own(model_type: str) -> None:
    model = toy_model(model_type)
    fuse_rotary(model)
    assert not fused(model)


def operators(model: nn.Module) -> list[str]:
    with torch.autograd.profiler.profile() as profile:
        model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    return [event.name.removeprefix("moetune::") for event in profile.function_events if "moetune::" in event.name]


def qwen3(**trains: bool) -> Any:
    model = toy_model("qwen3_moe", num_hidden_layers=1).requires_grad_(False)
    model.model.embed_tokens.requires_grad_()
    fuse_norms(model)
    fuse_rotary(model)
    for name, value in trains.items():
        getattr(model.model.layers[0].self_attn, name).requires_grad_(value)
    return model


def test_norms_are_in_the_kernel_unless_one_of_them_trains() -> None:
    """Of the norms then left, the one that is frozen runs its own kernel; the other's weight has its gradient."""
    found = operators(qwen3())
    assert found.count("rotate") == found.count("rotate_backward") == 1
    assert found.count("rms_norm") == 3  # before attention, before the experts and at the end
    model = qwen3(q_norm=True)
    found = operators(model)
    assert found.count("rotate") == found.count("rotate_backward") == 1
    assert found.count("rms_norm") == 4
    assert model.model.layers[0].self_attn.q_norm.weight.grad.abs().max() > 0


def test_a_copied_model_has_norms_of_its_own() -> None:
    """As the frozen reference of preference training: the original's norms train, and are not in its kernel."""
    model, ids = qwen3(), torch.arange(4)[None]
    copied = copy.deepcopy(model)
    expected = model(ids).logits.detach()
    attention = model.model.layers[0].self_attn.requires_grad_(True)
    nn.init.normal_(attention.q_norm.weight)
    assert torch.equal(copied(ids).logits.detach(), expected)
    assert not torch.allclose(model(ids).logits.detach(), expected)


def test_angles_of_another_dtype_are_rotated_by_the_models_own_code() -> None:
    """transformers promotes the product; the norms are computed all the same."""
    model, other = qwen3(), toy_model("qwen3_moe", num_hidden_layers=1).requires_grad_(False)
    other.load_state_dict(model.state_dict())
    rows, angles = torch.randn(1, 4, 32), torch.randn(2, 1, 4, 8, dtype=torch.bfloat16)
    ours, theirs = (one.model.layers[0].self_attn(rows, tuple(angles), None)[0] for one in (model, other))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
