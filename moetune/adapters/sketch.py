"""A number for each projection of an adapter, by which a wrong reading is found.

For the update ΔW_e of each expert e of a projection it is Σ_e w_e · u_eᵀ ΔW_e v_e, with random w, u and v that follow
from the projection's name. moetune stores it with every adapter that it writes. Exchanged factors, experts, ranks, gate
and up, or another scale give another number; a change of dtype does not, within the tolerance.
"""

import zlib
from collections.abc import Mapping

import torch

from moetune.adapters.factors import Adapter, Factors

_TOLERANCE = 0.02
"""In units of the root of the sum of squares of the terms; factors rounded to 16 bits differ by less than 0.01."""


def sketch(adapter: Adapter) -> dict[str, tuple[float, float]]:
    """Return name of a projection or linear layer -> (the number, the root of the sum of squares of its terms)."""
    return {name: _numbers(name, factors) for name, factors in sorted(adapter.named().items())}


def differing(adapter: Adapter, noted: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the names whose updates are not those of the recorded sketch `noted`, or are in only one of the two."""
    computed = sketch(adapter)
    wrong = []
    for name in sorted(computed.keys() | noted.keys()):
        now, then = computed.get(name), noted.get(name)
        if now is None or then is None:
            if (now or then) != (0.0, 0.0):
                wrong.append(name)
        elif abs(now[0] - then[0]) > _TOLERANCE * max(now[1], then[1]):
            wrong.append(name)
    return wrong


def _numbers(name: str, factors: Factors) -> tuple[float, float]:
    A, B = (half if half.ndim == 3 else half[None] for half in (factors.A, factors.B))
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    v = torch.randn(A.shape[0], A.shape[2], generator=generator)
    u = torch.randn(B.shape[0], B.shape[1], generator=generator)
    w = torch.randn(A.shape[0], generator=generator, dtype=torch.float64)
    inner = torch.einsum("eri,ei->er", A.float(), v).double()
    terms = factors.scale * w * (torch.einsum("eor,eo->er", B.float(), u).double() * inner).sum(1)
    return float(terms.sum()), float(terms.square().sum().sqrt())
