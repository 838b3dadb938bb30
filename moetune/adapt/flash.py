"""Flash attention within packed documents, with attention sinks: torch's kernels of CUDA and CPU.

A sink is one more key for each head, with a learned score and a value of zero. With the output and the logsumexp (lse)
of attention without it, attention with it is

    lse' = log(exp(lse) + exp(sink)),    out' = out · exp(lse - lse')

and the kernel's own backward, called with out' and lse', gives the gradients of query, key and value: it computes the
probabilities as exp(score - lse'), and needs of the output only D = ⟨dout, out'⟩. The gradient of the sink is
-Σ exp(sink - lse')·D over the tokens.

Shapes: T tokens of n documents, one after the other; h heads of queries, h_kv heads of keys and values; head size d.
q, out [T, h, d]; k and v [T, h_kv, d]; lse [h, T]; sink [h]; starts [n + 1]: the first token of each document, and T.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from moetune.compat.torch import apply_function, varlen_backward, varlen_forward

aten = torch.ops.aten


def within_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    starts: Tensor,
    longest: int,
    scaling: float,
    window: int,
    on_cpu: bool = False,
) -> Tensor:
    """Return causal attention [T, h, d] within each document.

    Args:
        sink: score of each head's sink; None for attention without sinks.
        longest: tokens of the longest document.
        scaling: factor of the scores.
        window: number of last tokens, its own included, that a token attends to; 0 for all.
        on_cpu: use the CPU's kernel and not CUDA's; both run on fake CPU tensors.
    """
    out: Tensor = apply_function(_Attention, q, k, v, sink, starts, longest, scaling, window, on_cpu)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *how: Any) -> Tensor:
        starts, longest, scaling, window, on_cpu = how
        if on_cpu:
            out, lse = _on_cpu(q, k, v, starts, scaling, window)
            states = []
        else:
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
        longest, scaling, window, on_cpu = ctx.how
        dsink = None
        if sink is not None and ctx.needs_input_grad[3]:
            weight = torch.exp(sink.to(lse.dtype)[:, None] - lse)  # [h, T]
            dsink = (dout.to(lse.dtype) * out).sum(-1).t().mul_(weight).sum(1).neg_().to(sink.dtype)
        if on_cpu:
            grads = _on_cpu_backward(dout, q, k, v, out, lse, starts, scaling, window)
        else:
            grads = varlen_backward(dout, q, k, v, out, lse, starts, longest, states, scaling, window)
        return *grads, dsink, None, None, None, None, None


# --- The CPU's kernel -----------------------------------------------------------------------------------------------


def _pieces(starts: Tensor, window: int, like: Tensor) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
    """Yield (query rows, key rows, keyword arguments `is_causal` and `attn_mask`) of each call of the CPU's kernel.

    The kernel has no sliding windows. A document that is no longer than `window`, or any if `window` is 0, is one
    call. Otherwise, with a window of w tokens, a call has w queries and at most 2w - 1 keys, so that its mask, in the
    dtype of `like`, is small and the time grows with the length, not its square.
    """
    ends = starts.tolist()
    for begin, end in pairwise(ends):
        if not window or end - begin <= window:
            yield slice(begin, end), slice(begin, end), {"is_causal": True}
            continue
        for first in range(begin, end, window):
            queries = torch.arange(first, min(first + window, end))
            keys = torch.arange(max(begin, first - window + 1), int(queries[-1]) + 1)
            ago = queries[:, None] - keys
            hidden = (ago < 0) | (ago >= window)
            mask = torch.zeros(ago.shape, dtype=like.dtype).masked_fill_(hidden, -torch.inf)
            of_keys = slice(int(keys[0]), int(keys[-1]) + 1)
            yield slice(first, int(queries[-1]) + 1), of_keys, {"is_causal": False, "attn_mask": mask}


def _batched(*tensors: Tensor) -> list[Tensor]:
    """Return tensors [T, h, d] as the kernel's [1, h, T, d]."""
    return [tensor.transpose(0, 1)[None] for tensor in tensors]


@torch.library.custom_op("moetune::documents_attention", mutates_args=())
def _on_cpu(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scaling: float, window: int) -> tuple[Tensor, Tensor]:
    """Return the output [T, h, d] and the logsumexp [h, T] of causal attention within documents, without sinks.

    A token attends to the last `window` tokens, itself included; 0 for all.
    """
    out, lse = _empty_outputs(q, k, v, starts, scaling, window)
    for rows, keys, mask in _pieces(starts, window, q):
        part, sums = aten._scaled_dot_product_flash_attention_for_cpu(
            *_batched(q[rows], *_for_each_head(q, k[keys], v[keys])), 0.0, scale=scaling, **mask
        )
        out[rows], lse[:, rows] = part[0].transpose(0, 1), sums[0]
    return out, lse


@torch.library.custom_op("moetune::documents_attention_backward", mutates_args=())
def _on_cpu_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    scaling: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given `dout` [T, h, d], that of the output.

    `out` and `lse` are those of attention with its sinks, if it has any; `window` is in tokens, 0 for none.
    """
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys, mask in _pieces(starts, window, q):
        key, value = _for_each_head(q, k[keys], v[keys])
        tensors = _batched(dout[rows], q[rows], key, value, out[rows])
        causal = mask.pop("is_causal")
        dquery, dkey, dvalue = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, lse[:, rows][None].contiguous(), 0.0, causal, scale=scaling, **mask
        )
        dq[rows] = dquery[0].transpose(0, 1)
        for whole, part in ((dk, dkey), (dv, dvalue)):
            whole[keys] += part[0].transpose(0, 1).unflatten(1, (k.shape[1], -1)).sum(2)
    return dq, dk, dv


def _for_each_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values repeated for the heads of the queries: [T, h, d] each."""
    groups = q.shape[1] // k.shape[1]
    return k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)


@_on_cpu.register_fake
def _empty_outputs(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scaling: float, window: int
) -> tuple[Tensor, Tensor]:
    precise = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=precise)


@_on_cpu_backward.register_fake
def _empty_gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
