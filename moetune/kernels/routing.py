"""Operators of routing, softmax choice of experts and sorting of rows: torch reference and shapes.

With logits z [T, E] and p = softmax(z) in float32, a token's K experts are those of the largest p. Their weights w are
p, or p divided by its sum over the chosen experts.

Shapes: T tokens, E experts, K chosen experts per token.
"""

import torch
from torch import Tensor

from moetune.kernels.operators import operator

_KERNELS = "moetune.kernels.triton_routing"


@operator(
    lambda logits, top_k, normalized, dtype: (
        logits.new_empty((len(logits), top_k), dtype=dtype),
        logits.new_empty((len(logits), top_k), dtype=torch.int64),
    ),
    kernels=_KERNELS,
)
def choose(logits: Tensor, top_k: int, normalized: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Choose each token's experts: their weights [T, K] in `dtype` and ids [T, K] int64, by decreasing weight.

    With `normalized`, a token's weights are divided by their sum. Of equal weights a GPU chooses the lowest id.
    """
    weights, ids = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), top_k, dim=-1)
    if normalized:
        weights /= weights.sum(-1, keepdim=True)
    return weights.to(dtype), ids


@operator(lambda logits, ids, normalized, dtype: logits.new_empty(ids.shape, dtype=dtype), kernels=_KERNELS)
def weigh(logits: Tensor, ids: Tensor, normalized: bool, dtype: torch.dtype) -> Tensor:
    """Return the weights [T, K], in `dtype`, of the experts `ids` [T, K]; with `normalized` a token's sum to 1."""
    weights = torch.softmax(logits, -1, dtype=torch.float32).gather(-1, ids)
    if normalized:
        weights /= weights.sum(-1, keepdim=True)
    return weights.to(dtype)


@operator(lambda dweights, logits, *_: torch.empty_like(logits), kernels=_KERNELS)
def weigh_backward(dweights: Tensor, logits: Tensor, ids: Tensor, normalized: bool) -> Tensor:
    """Return the gradient of the logits, [T, E], from that of the weights, [T, K].

    dz = b · (dw − ⟨b, dw⟩), with dw = 0 for experts that are not chosen; b is p or, if `normalized`, the weights of the
    chosen experts and 0 for others.
    """
    base = torch.softmax(logits, -1, dtype=torch.float32)
    dbase = torch.zeros_like(base).scatter_(-1, ids, dweights.float())
    if normalized:
        chosen = base.gather(-1, ids)
        base = torch.zeros_like(base).scatter_(-1, ids, chosen / chosen.sum(-1, keepdim=True))
    return (dbase - (dbase * base).sum(-1, keepdim=True)).mul_(base).to(logits.dtype)


@operator(
    lambda numbers, count: (
        torch.empty_like(numbers, dtype=torch.int64),
        numbers.new_empty(count, dtype=torch.int32),
    ),
    kernels=_KERNELS,
)
def sorted_positions(numbers: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sort `numbers` [n], integers from 0 to `count` - 1, by a stable sort.

    Return the indices [n] int64 that sort them, and where each number ends among them, [count] int32: how many of
    `numbers` are not greater.

    A GPU does it in two launches. The first counts how often each number occurs in each block of 512, into 4 · `count`
    bytes per block (`count` rounded up to a power of two); the second writes the indices. torch's operations first
    convert the numbers to a narrower dtype, which a GPU sorts in fewer passes, and do not use `torch.bincount`, for
    which the host would wait.
    """
    order = torch.argsort(numbers.to(torch.uint8 if count <= 256 else torch.int32), stable=True)
    counts = torch.zeros(count, dtype=torch.int32, device=numbers.device)
    counts.scatter_(0, numbers.long(), 1, reduce="add")
    return order, counts.cumsum(0, dtype=torch.int32)
