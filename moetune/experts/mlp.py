"""The forward and backward maths of one layer's experts.

For a token row x sent to expert e with routing weight w:

    gate_up = W_gu·x + b_gu         act = g(gate_up)         y += w · (W_d·act + b_d)

and each W may carry low-rank factors: W·x + s·B·(A·x).

What backward needs is recomputed, one expert at a time, from x and the packed weights: no dequantized weight and no row
of act is kept, and rows of gate_up only if the bank's links say so (`keep_rows`), which spares backward a product. The
down projection does not run again: with dact = W_dᵀ·dy (which backward needs anyway),

    ∂L/∂w = ⟨dy, W_d·act + b_d⟩ = ⟨dact, act⟩ + ⟨dy, b_d⟩.

Shapes: T tokens, K experts a token, E experts, H model dim, I expert dim, O = rows of gate_up (2I, or I without gate),
N the rows of one expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from moetune.experts.projection import Gradients, Projection

if TYPE_CHECKING:
    from moetune.experts.bank import ExpertBank


@dataclass(frozen=True)
class Routing:
    """Token rows grouped by the slot of their expert: `order` lists flat (token, choice) positions, `counts` how many
    go to each."""

    order: Tensor
    counts: list[int]
    top_k: int

    @classmethod
    def of(cls, ids_TK: Tensor, counts: list[int]) -> Routing:
        """Of the chosen slots, of which each is chosen `counts` times."""
        return cls(torch.argsort(ids_TK.flatten(), stable=True), counts, ids_TK.shape[-1])

    def groups(self, bank: ExpertBank) -> Iterator[tuple[int, Tensor]]:
        """(expert, its flat positions [N]) for every expert of a bank that receives a token."""
        watch = bank.links.expert_watch
        for slot, flat_N in enumerate(self.order.split(self.counts)):
            if self.counts[slot]:
                if watch is not None:
                    watch(bank.held[slot])
                yield bank.held[slot], flat_N
        if watch is not None:
            watch(None)


def expert_mlp(bank: ExpertBank, x_TH: Tensor, weights_TK: Tensor, routing: Routing) -> Tensor:
    """The sum over each token's experts, weighted: y [T, H] in x's dtype; gradients flow to x, the weights, the bank.

    The autograd node is made before the products run, and they fill its output afterwards. A checkpointed layer stops
    its recomputation at the last tensor that backward needs, and for most models that is this node's: the experts'
    products then never run a second time. A node that keeps rows runs the products itself.
    """
    keeps = bank.links.keep_rows and torch.is_grad_enabled()
    y_TH = _ExpertMlp.apply(bank, routing, keeps, x_TH, weights_TK, *bank.parameters())
    if not keeps:
        with torch.no_grad():
            _fill(bank, routing, x_TH, weights_TK, y_TH)
    return y_TH


def _fill(
    bank: ExpertBank,
    routing: Routing,
    x_TH: Tensor,
    weights_TK: Tensor,
    y_TH: Tensor,
    rows: list[Tensor] | None = None,
) -> None:
    """Adds up y; `rows` is given the gate_up rows [N, O] of each expert."""
    y_TH.zero_()
    weights = weights_TK.flatten()
    for expert, flat_N in routing.groups(bank):
        _add_expert(bank, expert, flat_N // routing.top_k, x_TH, weights[flat_N, None], y_TH, rows)


def _add_expert(
    bank: ExpertBank,
    expert: int,
    token_N: Tensor,
    x_TH: Tensor,
    weights_N1: Tensor,
    y_TH: Tensor,
    rows: list[Tensor] | None,
) -> None:
    gate_up, down = bank.projections(expert, x_TH.dtype)
    gate_up_NO = gate_up.forward(x_TH[token_N])
    act_NI = bank.activation(gate_up_NO)
    if rows is not None:
        rows.append(gate_up_NO)
    del gate_up_NO
    y_TH.index_add_(0, token_N, down.forward(act_NI).mul_(weights_N1.to(x_TH.dtype)))


class _ExpertMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        bank: ExpertBank,
        routing: Routing,
        keeps: bool,
        x_TH: Tensor,
        weights_TK: Tensor,
        *parameters: nn.Parameter,
    ) -> Tensor:
        ctx.bank, ctx.counts, ctx.top_k = bank, routing.counts, routing.top_k
        y_TH = torch.empty_like(x_TH)
        rows: list[Tensor] = []
        if keeps:
            _fill(bank, routing, x_TH, weights_TK, y_TH, rows if any(ctx.needs_input_grad) else None)
        ctx.save_for_backward(x_TH, weights_TK, routing.order, *rows)
        return y_TH

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, weights_TK, order, *rows = ctx.saved_tensors
        bank, routing = ctx.bank, Routing(order, ctx.counts, ctx.top_k)
        _, _, _, need_x, need_weights, *_ = ctx.needs_input_grad
        dx_TH = torch.zeros_like(x_TH) if need_x else None
        weights = weights_TK.flatten()
        dweights = torch.zeros_like(weights) if need_weights else None
        grads: Gradients = {}

        def add_expert(expert: int, flat_N: Tensor, kept_NO: Tensor | None) -> None:
            """One expert's share. What it unpacks and recomputes is gone when it returns, before the next one's."""
            token_N = flat_N // routing.top_k
            weight_N1 = weights[flat_N, None].to(x_TH.dtype)
            gate_up, down = bank.projections(expert, x_TH.dtype)
            dy_NH = dy_TH[token_N]
            dact_NI = down.grad_input(dy_NH)  # before gate_up is unpacked: one unpacked matrix at a time

            unpacked = gate_up.weight() if kept_NO is None else None
            gate_up_NO = gate_up.forward(x_TH[token_N], unpacked) if kept_NO is None else kept_NO.detach()
            gate_up_NO.requires_grad_()
            with torch.enable_grad():
                act_NI = bank.activation(gate_up_NO)
            edge, act_NI = get_gradient_edge(act_NI), act_NI.detach()  # the way back does not need the rows
            if dweights is not None:
                dweight_N = torch.einsum("ni,ni->n", dact_NI, act_NI)
                if down.bias is not None:
                    dweight_N += dy_NH @ down.bias.to(dy_NH.dtype)
                dweights[flat_N] = dweight_N.to(dweights.dtype)
            if down.trains:
                down.add_gradients(grads, act_NI, dy_NH * weight_N1)
                _to_hook(bank, down, grads)
            if dx_TH is None and not gate_up.trains:
                return
            del act_NI, dy_NH
            (dgate_up_NO,) = torch.autograd.grad(edge, gate_up_NO, dact_NI.mul_(weight_N1))
            del edge, dact_NI, gate_up_NO
            if dx_TH is not None:
                dx_TH.index_add_(0, token_N, gate_up.grad_input(dgate_up_NO, unpacked))
            if gate_up.trains:
                gate_up.add_gradients(grads, x_TH[token_N], dgate_up_NO)
                _to_hook(bank, gate_up, grads)  # last: it may change the weight that was used above

        for number, (expert, flat_N) in enumerate(routing.groups(bank)):
            add_expert(expert, flat_N, rows[number] if rows else None)
        dweights_TK = None if dweights is None else dweights.view_as(weights_TK)
        return None, None, None, dx_TH, dweights_TK, *_of_parameters(bank, routing, grads)


def _to_hook(bank: ExpertBank, projection: Projection, grads: Gradients) -> None:
    """Gives the eager gradient hook, if there is one, the gradients of a matrix that trains in full."""
    hook = bank.links.eager_gradient_hook
    if hook is not None and projection.trained is not None:
        for parameter in projection.trained.parameters():
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
            if not routing.counts[bank.held.index(expert)]:
                for parameter in bank.trained[str(expert)].parameters():
                    hook(parameter, torch.zeros_like(parameter))
    for parameter in bank.parameters():
        if parameter in taken:
            yield None
        else:
            yield grads[parameter] if parameter in grads else torch.zeros_like(parameter)
