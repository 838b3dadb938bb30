"""Fused RMS norms: whose they replace, and what they compute."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from moetune.adapt.layers.norms import fuse_norms
from tests.toys import toy_model

NORMS = [LlamaRMSNorm, Qwen3MoeRMSNorm, GptOssRMSNorm]


def run(norm: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = norm(x)
    return out.detach(), torch.autograd.grad(out, x, dy.to(out.dtype))[0]


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)]
)
def test_a_fused_norm_is_its_class_in_float64_rounded_once(kind: type, dtype: torch.dtype, tolerance: float) -> None:
    """The output within the rounding of its dtype; the model's own is within two, three for the gradient."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, 5, 3, 64), torch.randn(2, 5, 3, 64)
    norm = kind(64, eps=1e-5)
    nn.init.normal_(norm.weight)
    norm.to(dtype).requires_grad_(False)
    x, dy = x.to(dtype), dy.to(dtype)
    own = run(norm, x, dy)
    fuse_norms(norm)
    found = run(norm, x, dy)
    x64, w64 = x.double().requires_grad_(), norm.weight.double()
    y64 = w64 * x64 * (x64.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    expected = y64.detach(), torch.autograd.grad(y64, x64, dy.double())[0]
    for ours, theirs, exact in zip(found, own, expected, strict=True):
        assert ours.dtype == theirs.dtype == dtype
        assert ((ours.double() - exact).abs() <= tolerance * exact.abs() + 1e-6).all()
        assert (ours.double() - theirs.double()).norm() <= 2 * tolerance * exact.norm()


def test_a_norm_that_trains_or_is_kept_wider_is_its_authors() -> None:
    norm = LlamaRMSNorm(8)
    fuse_norms(norm)
    x = torch.randn(3, 8)
    norm(x).sum().backward()
    assert norm.weight.grad is not None
    norm.requires_grad_(False)
    assert norm(x.bfloat16()).dtype == torch.float32  # as Llama's promotes


def test_norms_of_other_maths_stay_as_they_are() -> None:
    norm = Gemma3RMSNorm(8)
    fuse_norms(norm)
    assert "forward" not in vars(norm)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3"])
def test_the_norms_of_known_models_are_told_by_their_code(model_type: str) -> None:
    model = toy_model(model_type)
    norms = [module for module in model.modules() if "RMSNorm" in type(module).__name__]
    fuse_norms(model)
    assert norms
    assert all("forward" in vars(module) for module in norms)


def test_a_trace_sees_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = LlamaRMSNorm(8).bfloat16().requires_grad_(False)
    fuse_norms(norm)
    with torch.autograd.profiler.profile() as profile:
        norm(torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    names = [event.name for event in profile.function_events]
    assert names.count("moetune::rms_norm") == names.count("moetune::rms_norm_backward") == 1
