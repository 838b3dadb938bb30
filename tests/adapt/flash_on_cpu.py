"""torch's flash attention for CUDA has no CPU kernel: `flash_on_cpu` registers one, of whole matrices, for a test."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor


def _scores(q: Tensor, k: Tensor, starts: Tensor, scale: float, window: int) -> Tensor:
    """Return the scores [h, T, T], -∞ where a query does not see a key. `window` is the operator's: -1 for none."""
    tokens = torch.arange(len(q))
    ago, document = tokens[:, None] - tokens, torch.bucketize(tokens, starts, right=True)
    is_seen = (ago >= 0) & (document[:, None] == document) & ((ago <= window) | (window < 0))
    return torch.einsum("qhd,khd->hqk", q, _of_each_head(q, k)).mul(scale).masked_fill(~is_seen, -torch.inf)


def _of_each_head(q: Tensor, of_groups: Tensor) -> Tensor:
    return of_groups.repeat_interleave(q.shape[1] // of_groups.shape[1], 1)


def _forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *_: Any, **options: Any) -> tuple[Tensor, ...]:
    scores = _scores(q, k, starts, options["scale"], options["window_size_left"])
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), _of_each_head(q, v)).contiguous()
    return out, scores.logsumexp(-1), q.new_empty(2), q.new_empty(()), q.new_empty(0)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, starts: Tensor, *_: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    scale = options["scale"]
    weights = (_scores(q, k, starts, scale, options["window_size_left"]) - lse[..., None]).exp()
    of_weights = torch.einsum("qhd,khd->hqk", dout, _of_each_head(q, v)) - (dout * out).sum(-1).t()[..., None]
    of_scores = weights * of_weights * scale
    dk, dv = (
        torch.einsum("hqk,qhd->khd", *factors).unflatten(1, (k.shape[1], -1)).sum(2)
        for factors in ((of_scores, q), (weights, dout))
    )
    return torch.einsum("hqk,khd->qhd", of_scores, _of_each_head(q, k)), dk, dv


@pytest.fixture
def flash_on_cpu() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", _forward, "CPU")
        library.impl("_flash_attention_backward", _backward, "CPU")
        yield
