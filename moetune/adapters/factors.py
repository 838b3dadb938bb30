"""`Adapter`: LoRA factors of linear layers and experts in one form for all layouts.

Shapes: E experts, rank r, hidden size H, intermediate size I.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moetune.models.moe import ExpertShape

GATE_UP, DOWN = "gate_up", "down"


@dataclass(frozen=True)
class Factors:
    """LoRA factors: the update of a weight [out, in] is scale · B · A.

    Attributes:
        A: [r, in]; of the experts of a layer [E, r, in].
        B: [out, r]; of the experts of a layer [E, out, r]. The rows of gate and up are in the model's order.
        scale: the number that multiplies B · A.
    """

    A: Tensor
    B: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.A.shape[-2]

    @property
    def alpha(self) -> float:
        """The alpha that gives this scale as alpha / rank."""
        return self.scale * self.rank

    def delta(self) -> Tensor:
        """Return scale · B · A in float32."""
        return self.scale * (self.B.float() @ self.A.float())

    def padded(self, rank: int) -> "Factors":
        """Return factors of the larger rank `rank` with the same update, by adding zeros."""
        missing = rank - self.rank
        if not missing:
            return self
        pad = torch.nn.functional.pad
        return replace(self, A=pad(self.A, (0, 0, 0, missing)), B=pad(self.B, (0, missing)))

    def trimmed(self) -> "Factors":
        """Return factors without the ranks that `padded` added: the last ones, if both are zero there. If all are zero,
        return them as they are."""
        used = (self.A.any(-1) | self.B.any(-2)).reshape(-1, self.rank).any(0).nonzero()
        rank = int(used.max()) + 1 if len(used) else self.rank
        return self if rank == self.rank else replace(self, A=self.A[..., :rank, :], B=self.B[..., :rank])

    def scaled(self, scale: float) -> "Factors":
        """Return factors with the given scale and the same update: B is multiplied by the ratio of the two scales."""
        return self if scale == self.scale else replace(self, B=self.B * (self.scale / scale), scale=scale)


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter, by the names of the plain model, which is the one that transformers builds.

    Attributes:
        linears: path of a linear layer -> its factors.
        experts: path of a layer's experts -> projection (`gate_up`, the up projection alone where there is no gate; or
            `down`) -> the factors of all E experts, zero for an expert without factors.
        saved: name of a parameter -> its trained value, for modules that the adapter holds whole.
    """

    linears: Mapping[str, Factors]
    experts: Mapping[str, Mapping[str, Factors]]
    saved: Mapping[str, Tensor] = field(default_factory=dict)

    def named(self) -> dict[str, Factors]:
        """Return all factors: those of experts under `<experts>.gate_up` and `<experts>.down`."""
        by_name = dict(self.linears)
        for path, projections in self.experts.items():
            by_name |= {f"{path}.{name}": factors for name, factors in projections.items()}
        return by_name

    def unties(self, tied: Mapping[str, str]) -> list[str]:
        """Return those of the names `tied` (second name of a weight -> first) that are a weight of their own with it.

        PEFT gives factors to one module, whatever its weight is tied to.
        """
        with_factors = {f"{path}.weight" for path in self.linears}
        lone = [name for name, first in tied.items() if not with_factors.isdisjoint((name, first))]
        return [*lone, *untied_in(self.saved, tied)]


def untied_in(saved: Mapping[str, Tensor], tied: Mapping[str, str]) -> list[str]:
    """Return those of the names `tied` (second name of a weight -> first) that are a weight of their own where an
    adapter holds `saved` whole: PEFT unties a module that it saves alone, and saves one weight under both names."""
    pairs = {name: [saved[alias] for alias in (name, first) if alias in saved] for name, first in tied.items()}
    return [n for n, held in pairs.items() if held and not (len(held) == 2 and held[0].float().equal(held[1].float()))]


def parted(shape: ExpertShape, fused: Factors) -> tuple[Factors, Factors]:
    """Return the factors of gate and of up, from those of the fused projection (A [E, R, H], B [E, 2I, R]).

    If the first half of the ranks serves gate alone and the second half up alone, each gets its half; otherwise both
    get the whole A.
    """
    half = fused.rank // 2
    B, shared = split_parts(fused.B, half, shape.gate_and_up)
    if fused.rank % 2 == 0 and fused.B.any() and not shared:
        gate, up = (Factors(A, B[:, part], fused.scale) for part, A in enumerate(fused.A.split(half, 1)))
    else:
        gate, up = (Factors(fused.A, fused.B[:, of_part], fused.scale) for of_part in shape.gate_and_up)
    return gate, up


def fused(shape: ExpertShape, gate: Factors | None, up: Factors | None) -> Factors:
    """Return the factors of the fused projection from those of gate and up, the reverse of `parted`.

    None stands for a zero update of one of them. A is shared where both have the same; otherwise the ranks add up.
    """
    given = gate or up
    assert given is not None
    gate, up = gate or replace(given, B=torch.zeros_like(given.B)), up or replace(given, B=torch.zeros_like(given.B))
    experts, outputs, rank = gate.B.shape
    if gate.scale == up.scale and gate.A.equal(up.A):
        B = gate.B.new_empty(experts, 2 * outputs, rank)
        for of_part, part in zip(shape.gate_and_up, (gate, up), strict=True):
            B[:, of_part] = part.B
        return Factors(gate.A, B, gate.scale)
    rank = max(gate.rank, up.rank)
    gate, up = gate.padded(rank), up.scaled(gate.scale).padded(rank)
    A, B = torch.stack((gate.A, up.A), 1), torch.stack((gate.B, up.B), 1)
    return Factors(*join_experts(A, B, range(experts), experts, shape.gate_and_up), gate.scale)


def join_experts(
    A: Tensor, B: Tensor, ids: Iterable[int], experts: int, rows: tuple[slice, ...]
) -> tuple[Tensor, Tensor]:
    """Spread the factors of n experts, in parts, over all E experts of a layer, with zeros for the others.

    Args:
        A: [n, parts, r, in], where parts is 2 if gate and up have separate factors, else 1.
        B: [n, parts, out / parts, r].
        ids: ids of the n experts.
        experts: E.
        rows: the output rows of each part.

    Returns:
        A [E, R, in] and B [E, out, R], where R = parts·r: a part's rows use its own r columns.
    """
    chosen = list(ids)
    _, parts, rank, into = A.shape
    A_all = A.new_zeros(experts, parts * rank, into)
    A_all[chosen] = A.flatten(1, 2)
    B_all = B.new_zeros(experts, parts * B.shape[2], parts * rank)
    for part, of_part in enumerate(rows):
        B_all[chosen, of_part, part * rank : (part + 1) * rank] = B[:, part]
    return A_all, B_all


def split_parts(B: Tensor, rank: int, rows: tuple[slice, ...]) -> tuple[Tensor, bool]:
    """Split the B factors [n, out, parts·r] of joined parts, such as gate and up, into those of each part.

    Args:
        rank: r, the rank of a part.
        rows: the output rows of each part.

    Returns:
        The B factors [n, parts, out / parts, r], and whether B has nonzero values outside of them, which means that the
            parts share their factors.
    """
    blocks, rest = [], B.clone()
    for part, of_part in enumerate(rows):
        columns = slice(part * rank, (part + 1) * rank)
        blocks.append(B[:, of_part, columns])
        rest[:, of_part, columns] = 0
    return torch.stack(blocks, 1), bool(rest.any())


def plain_number(number: float) -> Any:
    """Return a whole number as an int, so that JSON shows it without a decimal point; any other as it is."""
    return int(number) if number == int(number) else number
