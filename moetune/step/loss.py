"""Cross-entropy that keeps nothing but the logits, and turns them into their own gradient.

For a token with logits z [V] and target t, and the step's gradient g:

    loss = logsumexp(z) - z_t            ∂loss/∂z = g · (softmax(z) - onehot(t))

torch's own keeps float32 copies of z and of softmax(z), and makes two gradients of that size: about 12 bytes beside
each 16-bit logit. Here float32 exists for a block of tokens at a time, and the gradient is written over the logits.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

IGNORED = -100
"""The label of a token that carries no loss."""

_BLOCK_ELEMENTS = 2**23  # of logits in float32 at once: 32 MiB


def summed_cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """The sum over tokens, float32, of the cross-entropy of each whose target is not `IGNORED`.

    Backward overwrites the logits; whatever else needs them in backward, or a second backward, raises torch's error
    that a variable was modified in place.
    """
    return _CrossEntropy.apply(logits_NV, targets_N)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_NV, targets_N):
        logsumexp_N = torch.empty(len(logits_NV), dtype=torch.float32, device=logits_NV.device)
        for rows in _blocks(logits_NV):
            torch.logsumexp(logits_NV[rows].float(), -1, out=logsumexp_N[rows])
        counts_N = targets_N != IGNORED
        target_logits_N = logits_NV.gather(-1, targets_N.clamp_min(0)[:, None])[:, 0].float()
        ctx.save_for_backward(logits_NV, targets_N, logsumexp_N)
        return (logsumexp_N - target_logits_N).mul_(counts_N).sum()

    @staticmethod
    def backward(ctx, gradient):
        logits_NV, targets_N, logsumexp_N = ctx.saved_tensors
        for rows in _blocks(logits_NV):
            counts_n1 = (targets_N[rows] != IGNORED)[:, None]
            block_nV = logits_NV[rows].float() - logsumexp_N[rows, None]
            block_nV.exp_()
            block_nV.scatter_add_(-1, targets_N[rows].clamp_min(0)[:, None], -counts_n1.float())
            logits_NV[rows] = block_nV.mul_(counts_n1).mul_(gradient)
        return logits_NV, None


def _blocks(logits_NV: Tensor) -> Iterator[slice]:
    tokens, vocabulary = logits_NV.shape
    size = max(1, _BLOCK_ELEMENTS // vocabulary)
    return (slice(start, start + size) for start in range(0, tokens, size))
