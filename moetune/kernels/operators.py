"""Operators of the experts' forward and backward: dispatcher, torch reference, shapes.

On a GPU an operator runs its Triton kernel (triton_kernels.py), elsewhere torch's operations. The operators are
registered with torch's dispatcher, so that a trace on fake tensors counts what a GPU runs: one launch each, and no
memory but the result. Where a kernel does not work (registry.py), torch's operations run.

Shapes: T tokens, K chosen experts per token, H hidden size, I intermediate size; C experts in a group with N rows
together, sorted by expert; p input and q output features, rank r. The low-rank factors of a projection have P parts: 2
if gate and up have separate factors, else 1.

Arguments of several operators: `order` [N] are the rows' flat positions token·K + choice; `weights` [T·K] are the
routing weights by flat position, None for 1; `counts` holds each expert's number of rows, and `ends` [C] int32 the
cumulative sums, None if C is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from moetune.compat.torch import is_observed
from moetune.kernels.grouped import library, product_of_groups
from moetune.kernels.registry import OPERATORS, Operator, on_gpu, without_kernel


def operator(
    fake: Callable[..., Any] = lambda *_: None,
    *,
    mutates: Sequence[str] = (),
    scratch: Sequence[str] = (),
    kernels: str = "moetune.kernels.triton_kernels",
) -> Callable[[Any], Any]:
    """Return a decorator that registers a function of torch operations as the operator `moetune::<its name>`.

    The decorated function becomes a call of the operator with the same arguments. If the first argument is on a GPU,
    the Triton kernel of the same name runs. A new operator is compared with its reference (`adapt/guard`) as soon as
    a run's model calls it.

    Args:
        fake: the operator's fake kernel, which returns an empty tensor of the result's shape; by default returns None.
        mutates: names of the arguments that the operator writes to.
        scratch: those of `mutates` that serve as scratch memory: what they hold afterwards has no meaning.
        kernels: the module in which a function of the same name launches the kernel.
    """

    def define(reference: Callable[..., Any]) -> Any:
        name = reference.__name__

        def kernel(*args: Any) -> Callable[..., Any] | None:
            module = on_gpu(kernels) if args[0].is_cuda else None
            return None if module is None else getattr(module, name)

        run = OPERATORS[name] = Operator(name, reference, kernel, tuple(scratch))
        library.define(torch.library.infer_schema(reference, mutates_args=mutates, op_name=name))
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"moetune::{name}", fake, lib=library)
        dispatched, without = getattr(torch.ops.moetune, name).default, without_kernel()

        # The dispatcher takes as long as a launch and is needed only by observers: autograd records nothing here.
        # Of an operator without its kernel they must see torch's operations.
        def call(*args: Any) -> Any:
            return (dispatched if name not in without and is_observed(args[0]) else run)(*args)

        return call

    return define


@operator(lambda gate_up, *_: gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2)))
def gated(gate_up: Tensor, interleaved: bool, alpha: float, limit: float) -> Tensor:
    """Return SwiGLU of gate_up rows [N, 2I]: silu(gate) · up, [N, I].

    If `limit` is not 0, return gpt-oss's variant: g · σ(alpha·g) · (clamp(up, ±limit) + 1) with g = min(gate, limit).
    With `interleaved`, gate and up alternate in the columns; otherwise all gate columns come first.
    """
    gate, up = _halves(gate_up, interleaved)
    if not limit:
        return silu(gate).mul_(up)
    gate = gate.clamp(max=limit)
    return torch.sigmoid(gate * alpha).mul_(gate).mul_(up.clamp(-limit, limit).add_(1))


@operator(mutates=("gate_up", "dact", "dweights"))
def gated_backward_(
    gate_up: Tensor,
    dact: Tensor,
    weights: Tensor,
    order: Tensor,
    dweights: Tensor | None,
    interleaved: bool,
    alpha: float,
    limit: float,
) -> None:
    """Compute the backward of `gated` in place.

    Args:
        gate_up: [N, 2I] input rows of `gated`; overwritten with their gradient, times the routing weight of each row.
        dact: [N, I] gradient of the result before the routing weights are applied; overwritten with act, the result.
        dweights: [T·K], overwritten at `order` with ⟨dact, act⟩; None to skip.
    """
    gate, up = _halves(gate_up, interleaved)
    act = gated(gate_up, interleaved, alpha, limit)
    if dweights is not None:
        dweights[order] = torch.einsum("ni,ni->n", dact, act).to(dweights.dtype)
    dact.mul_(weights[order, None].to(dact.dtype))
    if not limit:
        of_gate = torch.ops.aten.silu_backward(dact * up, gate)
        up.copy_(silu(gate).mul_(dact))
    else:
        inside_gate, inside_up = gate <= limit, up.abs() <= limit
        gate_, sigmoid = gate.clamp(max=limit), torch.sigmoid(gate.clamp(max=limit) * alpha)
        of_gate = sigmoid * (1 + gate_ * alpha * (1 - sigmoid)) * (up.clamp(-limit, limit) + 1) * dact * inside_gate
        up.copy_(gate_ * sigmoid * dact * inside_up)
    gate.copy_(of_gate)
    dact.copy_(act)


def _halves(gate_up: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views [N, I] of gate and up."""
    size = gate_up.shape[1] // 2
    return (gate_up[:, ::2], gate_up[:, 1::2]) if interleaved else (gate_up[:, :size], gate_up[:, size:])


@operator(lambda x, order, *_: x.new_empty((len(order), x.shape[1])), mutates=("inverse",))
def gather_rows(x: Tensor, order: Tensor, top_k: int, inverse: Tensor | None) -> Tensor:
    """Return the tokens' rows x [T, H] in the given order: a new tensor [N, H].

    At each position in `order`, `inverse` [T·K] int32 is overwritten with the index of that position's row in the
    result, unless `inverse` is None.
    """
    if inverse is not None:
        inverse[order] = torch.arange(len(order), dtype=inverse.dtype, device=order.device)
    return x.index_select(0, order // top_k)


@operator(mutates=("out",))
def sum_rows_(out: Tensor, rows: Tensor, inverse: Tensor, weights: Tensor | None) -> None:
    """Write the weighted sum of each token's K rows [T·K, H] to `out` [T, H].

    `inverse` [T·K] int32 is the index in `rows` of the row at each flat position, as `gather_rows` writes it.
    """
    by_position = rows.index_select(0, inverse)
    if weights is not None:
        by_position.mul_(weights[:, None].to(by_position.dtype))
    if len(out):
        torch.sum(by_position.view(len(out), -1, out.shape[1]), 1, out=out)


@operator(mutates=("out", "rows"), scratch=("rows",))
def add_rows_(out: Tensor, rows: Tensor, order: Tensor, top_k: int, weights: Tensor | None) -> None:
    """Add rows [N, H], at most one for each token, times their weights to the rows of their tokens in `out` [T, H].

    `rows` are overwritten.
    """
    if weights is not None:
        rows.mul_(weights[order, None].to(rows.dtype))
    out.index_add_(0, order // top_k, rows)


@operator(lambda x, first, *_: x.new_empty((len(x), *first.shape[1:3])), mutates=("out",))
def low_rank(
    x: Tensor,
    first: Tensor,
    second: Tensor | None,
    base: Tensor | None,
    out: Tensor | None,
    ends: Tensor | None,
    counts: Sequence[int],
    scale: float,
) -> Tensor:
    """Return x·firstᵀ [N, P, r], a new tensor; write `base` plus its scaled product with `second` to `out`.

    Each row is multiplied by the factors of its expert, which are rounded to the dtype of x before.

    Args:
        x: [N, p], the same rows for all P parts, or [N, P, p].
        first: [C, P, r, p].
        second: [C, P, q, r]; None, with `base` and `out`, to compute only the returned product.
        base: in the shape of `out`; may be `out` itself.
        out: overwritten with base + scale · (x·firstᵀ)·secondᵀ: [N, P, q], or [N, q] with the sum over the parts.
    """
    parts, groups = range(first.shape[1]), (ends, counts)
    first = _cast(first, x.dtype)
    if x.dim() == 2:
        narrow = product_of_groups(x, first.flatten(1, 2).mT, *groups).unflatten(1, first.shape[1:3])
    else:
        narrow = torch.stack([product_of_groups(x[:, part], first[:, part].mT, *groups) for part in parts], 1)
    if second is not None and base is not None and out is not None:
        _add_low_rank(base, out, narrow, second, *groups, scale)
    return narrow


@operator(mutates=("out",), kernels="moetune.kernels.triton_product")
def low_rank_product_(
    out: Tensor,
    rows: Tensor,
    matrices: Tensor,
    narrow: Tensor,
    second: Tensor,
    ends: Tensor,
    counts: Sequence[int],
    scale: float,
    interleaved: bool,
) -> None:
    """Write the grouped product of rows and matrices, plus scale · narrow·secondᵀ, to `out`.

    Args:
        out: [N, q], contiguous, overwritten.
        rows: [N, p].
        matrices: [C, p, q].
        narrow: [N, P, r], contiguous, in the dtype of the rows.
        second: [C, P, q, r], summed over the parts; or [C, P, q / P, r], where each part has columns of its own.
        interleaved: columns of the parts alternate; otherwise those of a part are consecutive.
    """
    product, parts = product_of_groups(rows, matrices, ends, counts), second.shape[1]
    if second.shape[2] != out.shape[1]:
        product, out = (in_parts(columns, parts, interleaved=interleaved) for columns in (product, out))
    _add_low_rank(product, out, narrow, second, ends, counts, scale)


def in_parts(wide: Tensor, parts: int, *, interleaved: bool) -> Tensor:
    """Return a view [N, parts, q / parts] of [N, q], whose parts are consecutive or alternate."""
    return wide.unflatten(1, (-1, parts)).mT if interleaved else wide.unflatten(1, (parts, -1))


def _add_low_rank(
    base: Tensor,
    out: Tensor,
    narrow: Tensor,
    second: Tensor,
    ends: Tensor | None,
    counts: Sequence[int],
    scale: float,
) -> None:
    """Write base + scale · narrow·secondᵀ to `out`, for narrow rows [N, P, r]; other arguments as in `low_rank`."""
    second = _cast(second, narrow.dtype)
    if out.dim() == 2:
        _add_product(base, narrow.flatten(1), second.transpose(1, 2).flatten(2), out, ends, counts, scale)
    else:
        for part in range(second.shape[1]):
            _add_product(base[:, part], narrow[:, part], second[:, part], out[:, part], ends, counts, scale)


def _cast(factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factors of C experts in `dtype`; of a factor that all share, the one cast copy for each."""
    return factors[:1].to(dtype).expand_as(factors) if factors.stride(0) == 0 else factors.to(dtype)


def _add_product(
    base: Tensor, rows: Tensor, factors: Tensor, out: Tensor, ends: Tensor | None, counts: Sequence[int], scale: float
) -> None:
    """Write base + scale · rows·factorsᵀ to `out` [N, q], for rows [N, p] and factors [C, q, p]."""
    if ends is None:
        torch.addmm(base, rows, factors[0].T, alpha=scale, out=out)
    else:
        torch.add(base, product_of_groups(rows, factors.mT, ends, counts), alpha=scale, out=out)


@operator(mutates=("of_first", "of_second"))
def low_rank_gradients_(
    narrow_out: Tensor,
    x: Tensor,
    narrow_in: Tensor,
    dout: Tensor,
    of_first: Tensor | None,
    of_second: Tensor | None,
    weights: Tensor | None,
    order: Tensor | None,
    ends: Tensor | None,
    counts: Sequence[int],
    scale: float,
) -> None:
    """Write the gradients of both factors of `low_rank`, summed over each expert's rows; zeros without rows.

    With w the routing weight of a row, `of_first` [C, P, r, p] = scale · Σ w·narrow_outᵀ·x and `of_second` [C, P, q, r]
    = scale · Σ w·doutᵀ·narrow_in. If `weights` and `order` are None, w is 1. A gradient that is None is
    skipped.

    Args:
        narrow_out: dout·second, [N, P, r].
        x: input rows [N, p].
        narrow_in: x·firstᵀ, [N, P, r].
        dout: gradient of the output rows, [N, P, q], or [N, q] if P is 1.
    """
    factor: Tensor | float = scale
    if weights is not None and order is not None:
        factor = weights[order, None, None].to(x.dtype) * scale
    if of_first is not None:
        of_first.copy_(product_of_groups((narrow_out * factor).flatten(1).T, x, ends, counts).view(of_first.shape))
    dout, narrow_in = dout.view(len(dout), narrow_in.shape[1], -1) if dout.dim() == 2 else dout, narrow_in * factor
    if of_second is None:
        return
    for part in range(of_second.shape[1]):
        of_second[:, part].copy_(product_of_groups(dout[:, part].T, narrow_in[:, part], ends, counts))
