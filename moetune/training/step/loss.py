"""Cross-entropy without all logits at once: chunk by chunk they are computed, turned into their gradient, and freed.

For a token with logits z [V] and target t, and the tokens D of a whole step,

    loss = (logsumexp(z) - z_t) / D            ∂loss/∂z = (softmax(z) - onehot(t)) / D

Forward does all the work. A chunk's logits come from the model's LM head (lm_head.py), and a block of them at a time is
in float32. Their gradient overwrites them, rounded once, and goes back through the LM head; what is left of a chunk is
the gradient of its hidden states and of the LM head's parameters. Backward scales these in place and returns them. So
the gradient of an LM head, 1 GiB for some models, exists once, and backward can run once.

Tokens without a loss are computed too: leaving them out would make the host wait for the GPU, and memory unpredictable.

Shapes: N tokens of a batch, n of a chunk or block; H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from moetune.training.step.lm_head import HeadSizes, LMHead

IGNORED = -100
"""The label of a token that carries no loss."""

BLOCK_ELEMENTS = 2**23
"""Logits in float32 at once, where the compute dtype is narrower: 32 MiB."""


@dataclass(frozen=True)
class Chunks:
    """Chunks of `size` tokens, and within them blocks of `block` tokens, whose logits are in float32 at once."""

    tokens: int
    size: int
    block: int

    @classmethod
    def of(cls, memory: int | None, head: HeadSizes, tokens: int) -> Chunks:
        """Return chunks of as many tokens as `memory` bytes hold, at least one; all of them for None."""
        size = chunk_tokens(memory, head.vocabulary, head.width, head.row_bytes, tokens)
        return cls(tokens, size, size if head.width == 4 else min(size, block_tokens(head.vocabulary)))

    def slices(self) -> Iterator[slice]:
        """Yield the tokens of each chunk."""
        for start in range(0, self.tokens, self.size):
            yield slice(start, start + self.size)

    def blocks(self, tokens: int) -> Iterator[slice]:
        """Yield the tokens of each block, in a chunk of so many."""
        for start in range(0, tokens, self.block):
            yield slice(start, start + self.block)


def chunk_tokens(memory: int | None, vocabulary: int, width: int, row_bytes: int, tokens: int) -> int:
    """Return n, the tokens of a chunk: as many as `memory` bytes hold, at least one, and at most all `tokens`.

    A chunk takes n·row_bytes for its logits and, if these are narrower than float32, 4·V·min(n, 2²³/V) for a block.

    Args:
        memory: None if all tokens are one chunk.
        width, row_bytes: as in `LMHead`.
    """
    if memory is None:
        return tokens
    block = min(tokens, block_tokens(vocabulary)) if width < 4 else 0
    fits = (memory - 4 * vocabulary * block) // row_bytes
    if fits < block:  # then a block has the whole chunk
        fits = memory // (row_bytes + 4 * vocabulary)
    return max(1, min(fits, tokens))


def block_tokens(vocabulary: int) -> int:
    """Return how many tokens' logits are in float32 at once."""
    return max(1, BLOCK_ELEMENTS // vocabulary)


def summed_cross_entropy(
    head: LMHead, hidden_NH: Tensor, targets_N: Tensor, *, divisor: Tensor | float = 1, memory: int | Chunks | None
) -> Tensor:
    """Return the summed cross-entropy of the tokens whose target is not `IGNORED`, over `divisor`, in float32.

    Gradients are rounded in forward, so divide by a step's tokens here, and not afterwards. Multiplying by a power of
    two, such as float16's loss scale, is exact later too.

    Args:
        memory: bytes that a chunk's logits may take (None: all at once), or the chunks themselves.
    """
    chunks = memory if isinstance(memory, Chunks) else Chunks.of(memory, head, len(hidden_NH))
    if torch.is_grad_enabled() and (hidden_NH.requires_grad or head.trained):
        return _CrossEntropy.apply(head, targets_N, divisor, chunks, hidden_NH, *head.trained)
    with torch.no_grad():
        losses = [_loss_of_chunk(head(hidden_NH[rows]), targets_N[rows], chunks) for rows in chunks.slices()]
        return torch.stack(losses).sum() / divisor


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: LMHead,
        targets_N: Tensor,
        divisor: Tensor | float,
        chunks: Chunks,
        hidden_NH: Tensor,
        *trained: Tensor,
    ) -> Tensor:
        needs_hidden, wanted = hidden_NH.requires_grad, list(trained)
        # divisor = fraction·2^exponent; divided by a fraction in [½, 1), gradients do not underflow in float16.
        fraction, exponent = torch.frexp(torch.as_tensor(divisor, dtype=torch.float32, device=hidden_NH.device))
        gradient_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        gradients: list[Tensor] = []
        losses = []
        for rows in chunks.slices():
            with torch.enable_grad():
                hidden_nH = hidden_NH[rows].detach().requires_grad_(needs_hidden)
                logits_nV = head(hidden_nH)
            edge = get_gradient_edge(logits_nV)  # taken before the logits are overwritten
            gradient_nV = logits_nV.detach()
            del logits_nV
            losses.append(_loss_of_chunk(gradient_nV, targets_N[rows], chunks, fraction))
            found = torch.autograd.grad(edge, [hidden_nH, *wanted] if needs_hidden else wanted, gradient_nV)
            del edge, gradient_nV, hidden_nH
            if gradient_NH is not None:
                gradient_NH[rows], found = found[0], found[1:]
            gradients = _added(gradients, found, alone=chunks.size >= chunks.tokens)
            del found
        gradients = [gradient.to(parameter.dtype) for gradient, parameter in zip(gradients, trained, strict=True)]
        ctx.save_for_backward(exponent)
        ctx.made = [gradient_NH, *_each_in_its_own_memory(gradients)]  # neither inputs nor outputs
        return torch.stack(losses).sum() / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (exponent,) = ctx.saved_tensors
        made, ctx.made = ctx.made, None
        if made is None:
            raise RuntimeError("this loss has gone backward already, and its gradients were freed")
        factor = torch.ldexp(gradient, -exponent)
        return None, None, None, None, *(None if one is None else one.mul_(factor) for one in made)


def _each_in_its_own_memory(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients that can be scaled in place: copies of those that are expanded or share memory.

    None is a view. A view's base would keep the memory alive, and for a tied embedding autograd would not add in place.
    """
    own: list[Tensor] = []
    bases: list[Tensor] = []
    for gradient in gradients:
        base = gradient if gradient._base is None else gradient._base
        is_shared = 0 in gradient.stride() or any(base is other for other in bases)
        bases.append(base)
        own.append(gradient.clone(memory_format=torch.contiguous_format) if is_shared else gradient.detach())
    return own


def _added(sums: list[Tensor], more: Sequence[Tensor], *, alone: bool) -> list[Tensor]:
    """Add a chunk's gradients to sums in float32, so that many chunks round no more often than one does."""
    if not sums:
        return list(more) if alone else [gradient.float() for gradient in more]
    return [total.add_(gradient) for total, gradient in zip(sums, more, strict=True)]


def _loss_of_chunk(logits_nV: Tensor, targets_n: Tensor, chunks: Chunks, divisor: Tensor | None = None) -> Tensor:
    """Return the summed loss. The logits are overwritten: with a `divisor`, by the gradient of the loss over it."""
    blocks = chunks.blocks(len(logits_nV))
    return torch.stack([_loss_of_block(logits_nV[rows], targets_n[rows], divisor) for rows in blocks]).sum()


def _loss_of_block(logits_bV: Tensor, targets_b: Tensor, divisor: Tensor | None) -> Tensor:
    counts_b = (targets_b != IGNORED).float()
    targets_b1 = targets_b.clamp_min(0)[:, None]
    block_bV = logits_bV.float()  # float32 logits themselves, or a copy
    block_bV -= block_bV.amax(-1, keepdim=True)
    chosen_b = block_bV.gather(-1, targets_b1)[:, 0]
    sums_b = block_bV.exp_().sum(-1)
    loss = (sums_b.log() - chosen_b).mul_(counts_b).sum()
    if divisor is not None:
        weights_b = counts_b / divisor
        block_bV *= (weights_b / sums_b)[:, None]
        block_bV.scatter_add_(-1, targets_b1, -weights_b[:, None])
        if logits_bV.dtype != torch.float32:
            logits_bV.copy_(block_bV)
    return loss
