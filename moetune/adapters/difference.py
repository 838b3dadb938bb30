"""`moetune adapter diff`: where the updates of two adapters differ, whatever their layouts."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moetune.adapters.base import AdapterBase
from moetune.adapters.factors import Adapter, Factors
from moetune.adapters.stacked import Order
from moetune.json_files import Answer
from moetune.models.moe import ExpertShape

_EQUAL = 1e-6
"""Updates that differ by less, relative to the larger one, are the same: float32 holds a factor to 6e-8."""


@dataclass(frozen=True)
class Differing:
    """One projection or linear layer whose updates differ.

    Attributes:
        name: `<experts>.gate_up`, `<experts>.down`, the path of a linear layer, or the name of a parameter held whole.
        relative: the Frobenius norm of the difference, relative to that of the larger update.
        experts: ids of the experts that differ; None for a linear layer.
        because: what would make them the same, if anything known does.
    """

    name: str
    relative: float
    experts: list[int] | None
    because: str | None


@dataclass(frozen=True)
class AdapterDifference(Answer):
    """The answer of `moetune adapter diff`.

    Attributes:
        compared: number of updates, and of parameters held whole, that both adapters have.
        only_a, only_b: names with an update in one of the two; zero updates count as none.
    """

    a: str
    b: str
    equal: bool
    compared: int
    only_a: list[str]
    only_b: list[str]
    differing: list[Differing]


def difference(base: AdapterBase, a: Adapter, b: Adapter, names: tuple[str, str]) -> AdapterDifference:
    """Compare the updates of two adapters of one base; `names` are what the answer calls them."""
    of_a, of_b = ({name: pair for name, pair in adapter.named().items() if _norm(pair).any()} for adapter in (a, b))
    differing = []
    for name in sorted(of_a.keys() & of_b.keys()):
        first, second = of_a[name], of_b[name]
        relative, experts = _apart(first, second)
        if relative > _EQUAL:
            layer = base.layers.get(name.rpartition(".")[0])
            because = _because(first, second, None if layer is None else layer.shape)
            differing.append(Differing(name, relative, experts, because))
    only_a, only_b = sorted(of_a.keys() - of_b.keys()), sorted(of_b.keys() - of_a.keys())
    for name in sorted(a.saved.keys() | b.saved.keys()):
        if name not in b.saved:
            only_a.append(name)
        elif name not in a.saved:
            only_b.append(name)
        elif not (saved_a := a.saved[name].float()).equal(saved_b := b.saved[name].float()):
            relative = float((saved_a - saved_b).norm() / max(saved_a.norm(), saved_b.norm()))
            differing.append(Differing(name, relative, None, None))
    equal = not (only_a or only_b or differing)
    compared = len(of_a.keys() & of_b.keys()) + len(a.saved.keys() & b.saved.keys())
    return AdapterDifference(*names, equal, compared, only_a, only_b, differing)


def _norm(*updates: Factors) -> Tensor:
    """Return the Frobenius norms of the sum of updates of one projection, [E] or [1].

    ‖B·A‖² = tr(BᵀB · AAᵀ) is computed expert by expert from two matrices [r, r], without the update itself.
    """
    norms = []
    for expert in range(len(updates[0].A) if updates[0].A.ndim == 3 else 1):
        own = [(pair.A[expert], pair.B[expert]) if pair.A.ndim == 3 else (pair.A, pair.B) for pair in updates]
        A = torch.cat([first.double() for first, _ in own])
        B = torch.cat([factors.scale * second.double() for factors, (_, second) in zip(updates, own, strict=True)], 1)
        norms.append(((B.mT @ B) * (A @ A.mT)).sum().clamp(min=0).sqrt())
    return torch.stack(norms)


def _apart(first: Factors, second: Factors) -> tuple[float, list[int] | None]:
    """Return the relative difference of two updates, and the ids of differing experts; None for a linear layer."""
    norms = _norm(first, replace(second, scale=-second.scale))
    largest = torch.maximum(_norm(first), _norm(second))
    differ = norms > _EQUAL * largest
    experts = None if first.A.ndim == 2 else [int(e) for e in differ.nonzero()]
    relative = float(norms.norm() / largest.norm()) if bool(differ.any()) else 0.0
    return relative, experts


def _because(first: Factors, second: Factors, shape: ExpertShape | None) -> str | None:
    """Return, in words, the known mistake that explains why two updates differ; None if none does. `shape` is that of
    the layer's experts, None for a linear layer."""
    for reason, changed in _mistakes(second, shape):
        if _apart(first, changed)[0] <= _EQUAL:
            return reason
    sizes = _norm(first), _norm(second)
    ratio = float(sizes[0].norm() / sizes[1].norm())
    if _apart(first, replace(second, scale=second.scale * ratio))[0] <= _EQUAL:
        return f"the scale: A's is {ratio:g} times B's"
    return None


def _mistakes(factors: Factors, shape: ExpertShape | None) -> Iterator[tuple[str, Factors]]:
    """Yield (mistake in words, `other` without it) for each way in which a layer's factors are often misread.

    Yields nothing for a linear layer, whose `shape` is None.
    """
    if shape is None or factors.A.ndim != 3:
        return
    peft, grouped = Order(False, False), Order(True, False)
    experts = len(factors.A)
    for written, intended in ((peft, grouped), (grouped, peft)):
        A, B = intended.read(*written.write(factors.A, factors.B), experts)
        yield "the order of the experts in lora_B: one of the two is read in the wrong one", replace(factors, A=A, B=B)
    if shape.has_gate and factors.B.shape[1] == 2 * shape.intermediate:
        gate, up = shape.gate_and_up
        B = torch.empty_like(factors.B)
        B[:, gate], B[:, up] = factors.B[:, up], factors.B[:, gate]
        yield "gate and up: they are exchanged in one of the two", replace(factors, B=B)
