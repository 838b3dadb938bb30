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
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from moetune.experts.dense import gradient_of_weights
from moetune.experts.grouped import Rows
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

    def groups(self, bank: ExpertBank, weights_TK: Tensor, dtype: torch.dtype) -> Iterator[Group]:
        """The groups of a bank that receive a token."""
        watch = bank.links.expert_watch
        groups = [slots for slots in bank.groups(dtype) if any(self.counts[slots.start : slots.stop])]
        ends = self._ends(groups)
        starts = [0, *accumulate(self.counts)]
        token_S, weight_S = self.order // self.top_k, weights_TK.flatten()[self.order].to(dtype)
        for slots in groups:
            if watch is not None:
                watch(bank.held[slots.start : slots.stop])
            own, of_group = slice(slots.start, slots.stop), slice(starts[slots.start], starts[slots.stop])
            rows = Rows(self.counts[own], None if len(slots) == 1 or ends is None else ends[own])
            yield Group(slots, rows, self.order[of_group], token_S[of_group], weight_S[of_group, None])
        if watch is not None:
            watch(())

    def _ends(self, groups: list[range]) -> Tensor | None:
        """[E] int32 on the device: where the rows of each expert end among its group's; None if each is alone."""
        if all(len(slots) == 1 for slots in groups):
            return None
        ends = [0] * len(self.counts)
        for slots in groups:
            ends[slots.start : slots.stop] = accumulate(self.counts[slots.start : slots.stop])
        is_cuda = self.order.is_cuda
        return torch.tensor(ends, dtype=torch.int32, pin_memory=is_cuda).to(self.order.device, non_blocking=True)


@dataclass(frozen=True)
class Group:
    """Neighbouring experts and what they receive: flat positions [N], tokens [N], weights [N, 1]."""

    slots: range
    rows: Rows
    flat_N: Tensor
    token_N: Tensor
    weight_N1: Tensor


class TokenSum:
    """Adds up the rows of groups for each token, into `out` [T, H].

    An expert has one row of a token at most, and alone is added at once. In a larger group a token may have several,
    and a GPU adds those at equal indices in any order: there all T·K rows wait in a tensor of their own, and each
    token's are summed in the end.
    """

    def __init__(self, out_TH: Tensor, routing: Routing, groups: list[range]) -> None:
        self.out_TH, self._top_k = out_TH, routing.top_k
        waits = self._top_k > 1 and any(len(slots) > 1 for slots in groups)
        self._rows = out_TH.new_empty(len(routing.order), out_TH.shape[1]) if waits else None
        if self._rows is None:
            out_TH.zero_()

    def add(self, group: Group, rows_NH: Tensor) -> None:
        if self._rows is None:
            self.out_TH.index_add_(0, group.token_N, rows_NH)
        else:
            self._rows.index_copy_(0, group.flat_N, rows_NH)

    def finish(self) -> None:
        if self._rows is not None:
            torch.sum(self._rows.view(-1, self._top_k, self._rows.shape[1]), 1, out=self.out_TH)


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
    rows: list[Tensor] | None = None,
    norms: Tensor | None = None,
) -> None:
    """Adds up y; `rows` is given the gate_up rows [N, O] of each group, `norms` those of their outputs."""
    total = TokenSum(y_TH, routing, list(bank.groups(x_TH.dtype)))
    for group in routing.groups(bank, weights_TK, x_TH.dtype):
        _add_group(bank, group, x_TH, total, rows, norms)
    total.finish()


def _add_group(
    bank: ExpertBank,
    group: Group,
    x_TH: Tensor,
    total: TokenSum,
    kept: list[Tensor] | None,
    norms: Tensor | None,
) -> None:
    gate_up, down = bank.projections(group.slots, x_TH.dtype)
    gate_up_NO = gate_up.forward(x_TH.index_select(0, group.token_N), group.rows)
    act_NI = bank.activation(gate_up_NO)
    if kept is not None:
        kept.append(gate_up_NO)
    del gate_up_NO, gate_up
    out_NH = down.forward(act_NI, group.rows)
    if norms is not None:
        norms.view(-1).index_copy_(0, group.flat_N, torch.linalg.vector_norm(out_NH, dim=-1, dtype=torch.float32))
    total.add(group, out_NH.mul_(group.weight_N1))


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
        dx = TokenSum(torch.empty_like(x_TH), routing, list(bank.groups(x_TH.dtype))) if need_x else None
        dweights = torch.zeros_like(weights_TK.flatten()) if need_weights else None
        grads: Gradients = {}

        def add_group(group: Group, kept_NO: Tensor | None) -> None:
            """One group's share. What it unpacks and recomputes is gone when it returns, before the next one's."""
            rows = group.rows
            gate_up, down = bank.projections(group.slots, x_TH.dtype)
            dy_NH = dy_TH.index_select(0, group.token_N)
            dact_NI = down.grad_input(dy_NH, rows)  # before gate_up is unpacked: one group of matrices at a time

            unpacked = gate_up.weights() if kept_NO is None else None
            if kept_NO is None:
                gate_up_NO = gate_up.forward(x_TH.index_select(0, group.token_N), rows, unpacked)
            else:
                gate_up_NO = kept_NO.detach()
            gate_up_NO.requires_grad_()
            with torch.enable_grad():
                act_NI = bank.activation(gate_up_NO)
            edge, act_NI = get_gradient_edge(act_NI), act_NI.detach()  # the way back does not need the rows
            if dweights is not None:
                dweight_N = torch.einsum("ni,ni->n", dact_NI, act_NI)
                if down.bias is not None:
                    dweight_N += rows.dot(dy_NH, down.bias.to(dy_NH.dtype))
                dweights.index_copy_(0, group.flat_N, dweight_N.to(dweights.dtype))
            if down.trains:
                down.add_gradients(grads, act_NI, dy_NH, rows, group.weight_N1)
                _to_hook(bank, down, grads)
            if dx is None and not gate_up.trains:
                return
            del act_NI, dy_NH, down
            (dgate_up_NO,) = torch.autograd.grad(edge, gate_up_NO, dact_NI.mul_(group.weight_N1))
            del edge, dact_NI, gate_up_NO
            if dx is not None:
                dx.add(group, gate_up.grad_input(dgate_up_NO, rows, unpacked))
            if gate_up.trains:
                gate_up.add_gradients(grads, x_TH.index_select(0, group.token_N), dgate_up_NO, rows)
                _to_hook(bank, gate_up, grads)  # last: it may change the weight that was used above

        for number, group in enumerate(routing.groups(bank, weights_TK, x_TH.dtype)):
            add_group(group, kept[number] if kept else None)
        if dx is not None:
            dx.finish()
        dx_TH = None if dx is None else dx.out_TH
        dweights_TK = None if dweights is None else dweights.view_as(weights_TK)
        return None, None, None, dx_TH, dweights_TK, ddense_TE, *_of_parameters(bank, routing, grads)


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
