"""Cross-entropy in chunks of tokens, so that all logits never exist together.

For a token with logits z [V] and target t, and D loss tokens in the whole step,

    loss = (logsumexp(z) - z_t) / D            ∂loss/∂z = (softmax(z) - onehot(t)) / D

The forward pass does all the work. For each chunk it calls the model's LM head (lm_head.py), converts the logits to
float32 one block at a time, overwrites them with their gradient (rounded once) and backpropagates that through the LM
head. What remains of a chunk is the gradient of its hidden states and of the LM head's parameters. The backward pass
multiplies these gradients in place by the incoming gradient and returns them. So there is one copy of the LM head's
gradient, which takes 1 GiB in some models, and the backward pass can run only once.

Tokens without a loss are computed too: to skip them the host would have to wait for the GPU, and memory would depend on
the data.

Shapes: N tokens of a batch, n tokens of a chunk, b tokens of a block; H hidden size, V vocabulary size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from moetune.training.step.lm_head import LMHead

IGNORED = -100
"""The label of a token that has no loss."""

BLOCK_ELEMENTS = 2**23
"""Minimum number of logits of a block (32 MiB in float32); narrower logits are converted to float32 block by block."""


@dataclass(frozen=True)
class Chunks:
    """How the tokens of a batch are divided for the loss.

    Attributes:
        tokens: number of tokens of the batch, N.
        size: tokens of a chunk: their logits exist at the same time, in the compute dtype.
        block: tokens of a block, a part of a chunk: their logits exist in float32 at the same time.
    """

    tokens: int
    size: int
    block: int

    @classmethod
    def of(cls, memory: int | None, head: LMHead, tokens: int) -> "Chunks":
        """Divide `tokens` tokens into the largest chunks whose logits fit in `memory` bytes (None: a single chunk)."""
        size = chunk_tokens(memory, head.vocabulary, head.width, head.row_bytes, tokens)
        return cls(tokens, size, size if head.width == 4 else min(size, block_tokens(memory, head.vocabulary)))

    def slices(self) -> Iterator[slice]:
        """Yield each chunk as a slice of the batch's tokens."""
        for start in range(0, self.tokens, self.size):
            yield slice(start, start + self.size)

    def blocks(self, tokens: int) -> Iterator[slice]:
        """Yield each block of a chunk of `tokens` tokens, as a slice of them."""
        for start in range(0, tokens, self.block):
            yield slice(start, start + self.block)


def chunk_tokens(memory: int | None, vocabulary: int, width: int, row_bytes: int, tokens: int) -> int:
    """Return n, the number of tokens of a chunk: as many as fit in `memory` bytes, at least 1, at most `tokens`.

    A chunk takes n·row_bytes for its logits and, if these are narrower than float32, 4·V·b for a block of b ≤ n tokens
    in float32: about half of the memory. None for `memory` makes one chunk. `vocabulary` (V), `width` and `row_bytes`
    are those of the `LMHead`.
    """
    if memory is None:
        return tokens
    block = min(tokens, block_tokens(memory, vocabulary)) if width < 4 else 0
    fits = (memory - 4 * vocabulary * block) // row_bytes
    if fits < block:  # the chunk is smaller than a block, so all of it is one block
        fits = memory // (row_bytes + 4 * vocabulary)
    elif 8 * (fits % max(block, 1)) < block:  # not another block for a few tokens
        fits -= fits % block
    return max(1, min(fits, tokens))


def block_tokens(memory: int | None, vocabulary: int) -> int:
    """Return b, the number of tokens of a block.

    A block's float32 logits take half of `memory` bytes, but are at least `BLOCK_ELEMENTS`, or all of one token,
    because each block takes about twenty kernel launches. None for `memory` gives that minimum.
    """
    return max(1, max(BLOCK_ELEMENTS, (memory or 0) // 8) // vocabulary)


def summed_cross_entropy(
    head: LMHead, hidden_NH: Tensor, targets_N: Tensor, *, divisor: Tensor | float = 1, memory: int | Chunks | None
) -> Tensor:
    """Return (Σ cross-entropy of the tokens whose target is not `IGNORED`) / `divisor`, a float32 scalar.

    The gradients are computed and rounded in the forward pass, so pass a step's number of loss tokens as `divisor`
    instead of dividing the result. Multiplying the result by a power of two, such as float16's loss scale, loses no
    precision. The backward pass can run once; a second one raises `RuntimeError`.

    Args:
        hidden_NH: hidden states [N, H].
        targets_N: token ids to predict [N], `IGNORED` for tokens without a loss.
        memory: bytes that the logits of a chunk may take (None: all tokens in one chunk), or the chunks themselves.
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
        # divisor = fraction·2^exponent. Only the fraction, in [½, 1), is applied here, so float16 does not underflow.
        fraction, exponent = torch.frexp(torch.as_tensor(divisor, dtype=torch.float32, device=hidden_NH.device))
        gradient_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        gradients: list[Tensor] = []
        losses = []
        for rows in chunks.slices():
            with torch.enable_grad():
                hidden_nH = hidden_NH[rows].detach().requires_grad_(needs_hidden)
                logits_nV = head(hidden_nH)
            edge = get_gradient_edge(logits_nV)  # must be taken before the logits are overwritten
            gradient_nV = logits_nV.detach()
            del logits_nV
            losses.append(_loss_of_chunk(gradient_nV, targets_N[rows], chunks, fraction))
            of_chunk = torch.autograd.grad(edge, [hidden_nH, *wanted] if needs_hidden else wanted, gradient_nV)
            _let_go_of_gradients(fraction)
            del edge, gradient_nV, hidden_nH
            if gradient_NH is not None:
                gradient_NH[rows], of_chunk = of_chunk[0], of_chunk[1:]
            gradients = _added(gradients, of_chunk, alone=chunks.size >= chunks.tokens)
            del of_chunk
        gradients = [gradient.to(parameter.dtype) for gradient, parameter in zip(gradients, trained, strict=True)]
        ctx.save_for_backward(exponent)
        ctx.made = [gradient_NH, *_each_in_its_own_memory(gradients)]  # not inputs or outputs: no save_for_backward
        return torch.stack(losses).sum() / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (exponent,) = ctx.saved_tensors
        gradients, ctx.made = ctx.made, None
        if gradients is None:
            raise RuntimeError("backward of this loss has run already, and its gradients were freed")
        factor = torch.ldexp(gradient, -exponent)
        return None, None, None, None, *(None if grad is None else grad.mul_(factor) for grad in gradients)


def _let_go_of_gradients(scalar: Tensor) -> None:
    """Wait until autograd's thread for the device of `scalar` holds no gradients of an earlier `torch.autograd.grad`.

    `grad` returns once the gradients exist, but the thread that computed them refers to them until its next task, which
    could be after the next chunk's logits were allocated. This gives it one, without a kernel or an allocation.
    """
    with torch.enable_grad():
        leaf = scalar.detach().requires_grad_()
        torch.autograd.grad(leaf.view(()), leaf, scalar)


def _each_in_its_own_memory(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients that can be scaled in place: copies of those that are expanded or share memory with another.

    No result is a view, which would keep its base's memory alive and keep autograd from accumulating the gradient of a
    tied embedding in place.
    """
    own: list[Tensor] = []
    bases: list[Tensor] = []
    for gradient in gradients:
        base = gradient if gradient._base is None else gradient._base
        is_shared = 0 in gradient.stride() or any(base is known for known in bases)
        bases.append(base)
        own.append(gradient.clone(memory_format=torch.contiguous_format) if is_shared else gradient.detach())
    return own


def _added(sums: list[Tensor], new: Sequence[Tensor], *, alone: bool) -> list[Tensor]:
    """Add the gradients of a chunk, `new`, to `sums` in place, and return the sums; at the first chunk they are empty.

    They are in float32, to be rounded once. If there is only one chunk (`alone`), `new` is returned as it is.
    """
    if not sums:
        return list(new) if alone else [gradient.float() for gradient in new]
    return [total.add_(gradient) for total, gradient in zip(sums, new, strict=True)]


def _loss_of_chunk(logits_nV: Tensor, targets_n: Tensor, chunks: Chunks, divisor: Tensor | None = None) -> Tensor:
    """Return the summed loss of a chunk, a scalar, and overwrite its logits.

    With a `divisor` the logits become the gradient of loss / `divisor`, otherwise intermediate values.
    """
    blocks = chunks.blocks(len(logits_nV))
    return torch.stack([_loss_of_block(logits_nV[rows], targets_n[rows], divisor) for rows in blocks]).sum()


def _loss_of_block(logits_bV: Tensor, targets_b: Tensor, divisor: Tensor | None) -> Tensor:
    counts_b = (targets_b != IGNORED).float()
    targets_b1 = targets_b.clamp_min(0)[:, None]
    block_bV = logits_bV.float()  # the logits themselves if they are float32, else a copy
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
