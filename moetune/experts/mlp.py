"""The forward and backward maths of one layer's experts.

For a token row x sent to expert e with routing weight w:

    gate_up = W_gu·x + b_gu         act = g(gate_up)         y += w · (W_d·act + b_d)

and each W may carry low-rank factors: W·x + s·B·(A·x).

Experts are worked on in groups of neighbours (`ExpertBank.groups`). What backward needs is recomputed, one group at a
time, from x and the packed weights: no dequantized weight and no row of act is kept, and rows of gate_up only if the
bank's links say so (`keep_rows`), which spares backward a product. The down projection does not run again: with
dact = W_dᵀ·dy (which backward needs anyway),

    ∂L/∂w = ⟨dy, W_d·act + b_d⟩ = ⟨dact, act⟩ + ⟨dy, b_d⟩.

Shapes: T tokens, K experts a token, E experts, H model dim, I expert dim, O = rows of gate_up (2I, or I without gate),
C experts of a group, N their rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moetune.experts.dense import gradient_of_weights
from moetune.experts.kernels import operators as kernels
from moetune.experts.projection import Gradients, Projection, Weighted
from moetune.experts.routing import Group, Routing, TokenRows

if TYPE_CHECKING:
    from moetune.experts.bank import ExpertBank


def expert_mlp(
    bank: ExpertBank,
    x_TH: Tensor,
    weights_TK: Tensor,
    routing: Routing,
    norms: Tensor | None = None,
    dense_TE: Tensor | None = None,
) -> Tensor:
    """The sum over each token's experts, weighted: y [T, H] in x's dtype; gradients flow to x, the weights, the bank.
    `norms` [T, K], where no gradient is asked for, is filled with the norms of what is summed, before it is weighted.
    `dense_TE` weights get the gradients that they had if all experts had been chosen (dense.py); nothing else of them.

    The autograd node is made before the products run, and they fill its output afterwards. A checkpointed layer stops
    its recomputation at the last tensor that backward needs, and for most models that is this node's: the experts'
    products then never run a second time. A node that keeps rows runs the products itself.
    """
    keeps = bank.links.keep_rows and torch.is_grad_enabled()
    y_TH = _ExpertMlp.apply(bank, routing, keeps, x_TH, weights_TK, dense_TE, *bank.parameters())
    if not keeps:
        with torch.no_grad():
            _fill(bank, routing, x_TH, weights_TK, y_TH, norms=norms)
    return y_TH


def _fill(
    bank: ExpertBank,
    routing: Routing,
    x_TH: Tensor,
    weights_TK: Tensor,
    y_TH: Tensor,
    kept: list[Tensor] | None = None,
    norms: Tensor | None = None,
) -> None:
    """Adds up y; `kept` is given the gate_up rows [N, O] of each group, `norms` those of their outputs."""
    groups = list(bank.groups(x_TH.dtype))
    tokens = TokenRows(x_TH, y_TH, routing, groups, weights_TK.flatten())
    for group in bank.watched(routing.groups(groups)):
        _add_group(bank, group, tokens, kept, norms)
    tokens.finish()


def _add_group(
    bank: ExpertBank, group: Group, tokens: TokenRows, kept: list[Tensor] | None, norms: Tensor | None
) -> None:
    gate_up, down = bank.projections(group.turns, tokens.x_TH.dtype)
    gate_up_NO = gate_up.forward(tokens.of(group), group.rows)
    act_NI = bank.act(gate_up_NO)
    if kept is not None:
        kept.append(gate_up_NO)
    del gate_up_NO, gate_up
    out_NH = down.forward(act_NI, group.rows, into=tokens.place(group))
    if norms is not None:
        norms.view(-1).index_copy_(0, group.order, torch.linalg.vector_norm(out_NH, dim=-1, dtype=torch.float32))
    tokens.add(group, out_NH)


class _ExpertMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        bank: ExpertBank,
        routing: Routing,
        keeps: bool,
        x_TH: Tensor,
        weights_TK: Tensor,
        dense_TE: Tensor | None,
        *parameters: nn.Parameter,
    ) -> Tensor:
        ctx.bank, ctx.counts, ctx.top_k = bank, routing.counts, routing.top_k
        ctx.groups = list(bank.groups(x_TH.dtype)) if keeps else None
        y_TH = torch.empty_like(x_TH)
        rows: list[Tensor] = []
        if keeps:
            _fill(bank, routing, x_TH, weights_TK, y_TH, rows if any(ctx.needs_input_grad) else None)
        ctx.save_for_backward(x_TH, weights_TK, routing.order, *rows)
        return y_TH

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, weights_TK, order, *kept = ctx.saved_tensors
        bank, routing = ctx.bank, Routing(order, ctx.counts, ctx.top_k)
        _, _, _, need_x, need_weights, need_dense, *_ = ctx.needs_input_grad
        # first: eager gradients may change the experts
        ddense_TE = gradient_of_weights(bank, x_TH, dy_TH) if need_dense else None
        groups = ctx.groups if kept else list(bank.groups(x_TH.dtype))
        weights, dx_TH = weights_TK.flatten(), torch.empty_like(x_TH) if need_x else None
        tokens = TokenRows(dy_TH.contiguous(), dx_TH, routing, groups)
        dweights = torch.zeros_like(weights) if need_weights else None
        grads = Gradients(complete=all(routing.counts))

        def add_group(group: Group, kept_NO: Tensor | None) -> None:
            """One group's share. What it unpacks and recomputes is gone when it returns, before the next one's."""
            rows, weighted = group.rows, Weighted(weights, group.order)
            gate_up, down = bank.projections(group.turns, x_TH.dtype)
            dy_NH = tokens.of(group)
            dact_NI = down.grad_input(dy_NH, rows)  # before gate_up is unpacked: one group of matrices at a time

            x_NH = unpacked = None
            if kept_NO is None or gate_up.trains:
                x_NH = kernels.gather_rows(x_TH, group.order, routing.top_k, None)
            if kept_NO is not None:
                gate_up_NO = kept_NO.clone()
            else:
                unpacked = gate_up.weights()
                gate_up_NO = gate_up.forward(x_NH, rows, unpacked)
            if not gate_up.trains:
                x_NH = None
            act_NI, dgate_up_NO = bank.act_backward(gate_up_NO, dact_NI, weighted, dweights)
            del gate_up_NO, dact_NI
            if dweights is not None and down.bias is not None:
                dweights.index_add_(0, group.order, rows.dot(dy_NH, down.bias.to(dy_NH.dtype)).to(dweights.dtype))
            if down.trains:
                down.add_gradients(grads, act_NI, dy_NH, rows, weighted)
                _to_hook(bank, down, grads)
            del act_NI, dy_NH, down
            if dx_TH is not None:
                tokens.add(group, gate_up.grad_input(dgate_up_NO, rows, unpacked, into=tokens.place(group)))
            if x_NH is not None:
                gate_up.add_gradients(grads, x_NH, dgate_up_NO, rows)
                _to_hook(bank, gate_up, grads)  # last: it may change the weight that was used above

        for number, group in enumerate(bank.watched(routing.groups(groups))):
            add_group(group, kept[number] if kept else None)
        tokens.finish()
        dweights_TK = None if dweights is None else dweights.view_as(weights_TK)
        return None, None, None, dx_TH, dweights_TK, ddense_TE, *_of_parameters(bank, routing, grads)


def _to_hook(bank: ExpertBank, projection: Projection, grads: Gradients) -> None:
    """Gives the eager gradient hook, if there is one, the gradients of a matrix that trains in full."""
    hook = bank.links.eager_gradient_hook
    if hook is not None:
        for full in projection.trained:
            for parameter in full.parameters():
                hook(parameter, grads.pop(parameter))


def _of_parameters(bank: ExpertBank, routing: Routing, grads: Gradients) -> Iterator[Tensor | None]:
    """What autograd is told of each parameter; None of those whose gradient the eager hook has had.

    An expert without tokens has a gradient of zero, not none: optimizers and reductions treat both alike.
    """
    hook = bank.links.eager_gradient_hook
    taken: set[nn.Parameter] = set()
    if hook is not None:
        taken = set(bank.trained.parameters())
        for expert in bank.plan.trained:
            if not routing.counts[bank.slot_of[expert]]:
                for parameter in bank.trained[str(expert)].parameters():
                    hook(parameter, torch.zeros_like(parameter))
    for parameter in bank.parameters():
        if parameter in taken:
            yield None
        else:
            yield grads[parameter] if parameter in grads else torch.zeros_like(parameter)
