"""The loss that overwrites its logits, against torch's cross-entropy."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moetune.step import loss
from moetune.step.loss import IGNORED, summed_cross_entropy

TOKENS, VOCABULARY = 23, 37


def example(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits with a gradient, and targets of which some are ignored."""
    random = torch.Generator().manual_seed(0)
    logits_NV = (4 * torch.randn(TOKENS, VOCABULARY, generator=random)).to(dtype)
    targets_N = torch.randint(VOCABULARY, (TOKENS,), generator=random)
    targets_N[::5] = IGNORED
    return logits_NV, targets_N


def ours(logits_NV: Tensor, targets_N: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """(loss, gradient of the logits). The logits are no leaf, as those of a model."""
    leaf_NV = logits_NV.clone().requires_grad_()
    summed = summed_cross_entropy(leaf_NV * 1, targets_N)
    (summed * scale).backward()
    assert leaf_NV.grad is not None
    return summed.detach(), leaf_NV.grad


def of_torch(logits_NV: Tensor, targets_N: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    leaf_NV = logits_NV.float().clone().requires_grad_()
    summed = functional.cross_entropy(leaf_NV, targets_N, reduction="sum", ignore_index=IGNORED)
    (summed * scale).backward()
    assert leaf_NV.grad is not None
    return summed.detach(), leaf_NV.grad


@pytest.mark.parametrize("block", [1, VOCABULARY, 5 * VOCABULARY, 2**23], ids=lambda size: f"blocks of {size}")
@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_float32_equals_torch(monkeypatch: pytest.MonkeyPatch, block: int, scale: float) -> None:
    monkeypatch.setattr(loss, "_BLOCK_ELEMENTS", block)
    value, gradient_NV = ours(*example(), scale)
    expected, expected_NV = of_torch(*example(), scale)
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(gradient_NV, expected_NV, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("block", [5 * VOCABULARY, 2**23])
def test_bfloat16_is_float32_rounded_once(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(loss, "_BLOCK_ELEMENTS", block)
    value, gradient_NV = ours(*example(torch.bfloat16))
    expected, expected_NV = of_torch(*example(torch.bfloat16))
    assert (value.dtype, gradient_NV.dtype) == (torch.float32, torch.bfloat16)
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(gradient_NV.float(), expected_NV, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ignored_is_no_loss_and_no_gradient(dtype: torch.dtype) -> None:
    logits_NV, targets_N = example(dtype)
    value, gradient_NV = ours(logits_NV, torch.full_like(targets_N, IGNORED))
    assert value.item() == 0
    assert not gradient_NV.any()


def test_ignored_tokens_have_no_gradient() -> None:
    logits_NV, targets_N = example()
    _, gradient_NV = ours(logits_NV, targets_N)
    assert not gradient_NV[targets_N == IGNORED].any()
    assert gradient_NV[targets_N != IGNORED].any(-1).all()


def test_a_second_backward_raises_instead_of_being_wrong() -> None:
    logits_NV, targets_N = example()
    summed = summed_cross_entropy(logits_NV.requires_grad_() * 1, targets_N)
    summed.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        summed.backward()
