"""LOMO and AdaLomo against their formulas and against the authors' package."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from moetune.training.optim import lomo
from moetune.training.optim.lomo import Adafactor, AdaLomo, Lomo


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((64, 80), (3, 8, 8), (7,))]


def step(optimizer: torch.optim.Optimizer, trained: list[nn.Parameter]) -> None:
    for parameter in trained:
        parameter.grad = torch.cos(parameter.detach())
    optimizer.step()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_in_float32_lomo_is_sgd(decay: float) -> None:
    ours, torchs = parameters(), parameters()
    optimizers = Lomo(ours, 0.1, decay), torch.optim.SGD(torchs, 0.1, weight_decay=decay)
    for _ in range(5):
        step(optimizers[0], ours)
        step(optimizers[1], torchs)
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lomo_computes_in_float32_and_rounds_once(decay: float, dtype: torch.dtype) -> None:
    trained = parameters(dtype)
    before = [p.detach().float() for p in trained]
    step(Lomo(trained, 0.1, decay), trained)
    for parameter, old in zip(trained, before, strict=True):
        assert parameter.grad is not None
        expected = old.add(parameter.grad.float().add(old, alpha=decay), alpha=-0.1)
        assert torch.equal(parameter.detach(), expected.to(dtype))


def adalomo_by_the_paper(parameter: torch.Tensor, steps: int, lr: float, decay: float) -> torch.Tensor:
    """arXiv 2310.10195, algorithm 1, in float64 on one matrix or vector, whole."""
    w = parameter.detach().double().clone()
    r, c = torch.zeros(w.shape[0], dtype=torch.float64), torch.zeros(w.shape[-1], dtype=torch.float64)
    v = torch.zeros_like(w)
    for t in range(1, steps + 1):
        g, beta = torch.cos(w), 1 - t**-0.8
        if w.dim() == 2:
            r, c = beta * r + (1 - beta) * (g**2).mean(1), beta * c + (1 - beta) * (g**2).mean(0)
            v = torch.outer(r, c) / r.mean()
        else:
            v = beta * v + (1 - beta) * g**2
        u = g / v.sqrt()
        eta = lr * max(1e-3, math.sqrt((w**2).mean()))
        w = w - eta * decay * w - eta * u / max(1.0, math.sqrt((u**2).mean()))
    return w


@pytest.mark.parametrize("block", [2**22, 160])  # whole, and two rows at a time
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adalomo_by_its_formula(decay: float, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lomo, "BLOCK", block)
    matrix, _, vector = parameters()
    expected = [adalomo_by_the_paper(w, 4, 0.05, decay) for w in (matrix, vector)]
    optimizer = AdaLomo([matrix, vector], 0.05, decay)
    for _ in range(4):
        step(optimizer, [matrix, vector])
    torch.testing.assert_close([p.detach().double() for p in (matrix, vector)], expected, rtol=1e-5, atol=1e-6)


def test_a_stack_is_as_many_matrices() -> None:
    _, stack, _ = parameters()
    alone = [nn.Parameter(matrix.detach().clone()) for matrix in stack]
    optimizers = AdaLomo([stack], 0.05), AdaLomo(alone, 0.05)
    for _ in range(3):
        step(optimizers[0], [stack])
        step(optimizers[1], alone)
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in alone]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("lr", [0.05, 0.8])
def test_adafactor_is_torchs(lr: float) -> None:
    """A matrix and a vector after five steps, to 1e-5; at 0.8 the rate falls with 1/√t from the second step on."""
    ours, torchs = parameters()[::2], parameters()[::2]
    optimizers = Adafactor(ours, lr), torch.optim.Adafactor(torchs, lr, eps=(1e-15, 1e-3), foreach=False)
    for _ in range(5):
        step(optimizers[0], ours)
        step(optimizers[1], torchs)
    torch.testing.assert_close([p.detach() for p in ours], [p.detach() for p in torchs], rtol=1e-5, atol=1e-5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x).squeeze(-1) - x.sum(-1).sin()).square().mean()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["lomo", "adalomo"])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_losses_are_those_of_the_authors_package(
    name: str, clip: float | None, decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lomo-optim 0.1.1, which updates in hooks; 20 steps, losses to 1e-6; AdaLomo's, whose updates are
    normalized and so feel every last bit, to 1e-4."""
    lomo_optim = pytest.importorskip("lomo_optim")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)  # its AdaLomo puts states on a GPU
    theirs, ours = Net(), Net()
    kind: Any = lomo_optim.Lomo if name == "lomo" else lomo_optim.AdaLomo
    reference = kind(theirs, lr=0.05, clip_grad_norm=clip, weight_decay=decay)
    optimizer = (Lomo if name == "lomo" else AdaLomo)(ours.parameters(), 0.05, decay)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(2))
    losses: list[tuple[float, float]] = []
    for _ in range(20):
        loss = theirs(x)
        if clip is not None:
            reference.grad_norm(loss)
        reference.fused_backward(loss, 0.05)
        own = ours(x)
        own.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(ours.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((own.item(), loss.item()))
    assert losses[-1][0] != pytest.approx(losses[0][0], rel=1e-2)
    for own_loss, their_loss in losses:
        assert own_loss == pytest.approx(their_loss, rel=1e-6 if name == "lomo" else 1e-4)
