"""Flash attention within packed documents, with attention sinks: torch's kernel for CUDA.

A sink is one more key for each head, with a learned score and a value of zero. With the output and the logsumexp (lse)
of attention without it, attention with it is

    lse' = log(exp(lse) + exp(sink)),    out' = out · exp(lse - lse')

and the kernel's own backward, called with out' and lse', gives the gradients of query, key and value: it computes the
probabilities as exp(score - lse'), and needs of the output only D = ⟨dout, out'⟩. The gradient of the sink is
-Σ exp(sink - lse')·D over the tokens.

Shapes: T tokens of n documents, one after the other; h heads of queries, h_kv heads of keys and values; head size d.
q, out [T, h, d]; k and v [T, h_kv, d]; lse [h, T]; sink [h]; starts [n + 1]: the first token of each document, and T.
"""

from typing import Any

import torch
from torch import Tensor

from moetune.compat.torch import apply_function, varlen_backward, varlen_forward


def within_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    starts: Tensor,
    longest: int,
    scaling: float,
    window: int,
) -> Tensor:
    """Return causal attention [T, h, d] within each document.

    Args:
        sink: score of each head's sink; None for attention without sinks.
        longest: tokens of the longest document.
        scaling: factor of the scores.
        window: number of last tokens, its own included, that a token attends to; 0 for all.
    """
    out: Tensor = apply_function(_Attention, q, k, v, sink, starts, longest, scaling, window)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *how: Any) -> Tensor:
        starts, longest, scaling, window = how
        out, lse, *states = varlen_forward(q, k, v, starts, longest, scaling, window)
        if sink is not None:
            whole = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
            out.mul_(lse.sub_(whole).exp_().t()[..., None])
            lse = whole
        ctx.save_for_backward(q, k, v, out, lse, sink, starts, *states)
        ctx.how = how[1:]
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sink, starts, *states = ctx.saved_tensors
        longest, scaling, window = ctx.how
        dsink = None
        if sink is not None and ctx.needs_input_grad[3]:
            weight = torch.exp(sink.to(lse.dtype)[:, None] - lse)  # [h, T]
            dsink = (dout.to(lse.dtype) * out).sum(-1).t().mul_(weight).sum(1).neg_().to(sink.dtype)
        grads = varlen_backward(dout, q, k, v, out, lse, starts, longest, states, scaling, window)
        return *grads, dsink, None, None, None, None
