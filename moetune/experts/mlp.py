"""Forward and backward of one layer's experts as a single autograd function (`expert_mlp`).

For a token row x sent to expert e with routing weight w, and g the activation function:

    gate_up = W_gu·x + b_gu         act = g(gate_up)         y += w · (W_d·act + b_d)

Each W may have low-rank factors A and B with scale s: W·x + s·B·(A·x).

Experts are computed in groups of consecutive slots (a slot is an expert's position in the order of computation).
Backward recomputes what it needs, one group at a time, from x and the quantized weights. No dequantized weight and no
row of act is kept; rows of gate_up are kept only with `keep_rows`, which saves backward one product, and are freed one
group at a time. Backward does not repeat the down projection: with dact = W_dᵀ·dy, which it needs anyway,

    ∂L/∂w = ⟨dy, W_d·act + b_d⟩ = ⟨dact, act⟩ + ⟨dy, b_d⟩.

Shapes: T tokens, K chosen experts per token, E experts, H hidden size, I intermediate size, O rows of gate_up (2I, or I
without gate); C experts in a group with N rows together.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moetune.compat.torch import apply_function
from moetune.experts.activation import Activation
from moetune.experts.context import ExpertHooks, Kind
from moetune.experts.permutation import Permutation, RowGroup, TokenRows
from moetune.experts.projection import Gradients, Projection, RowWeights
from moetune.kernels import operators as kernels
from moetune.kernels.grouped import GroupedGemm


class ExpertWeights(Protocol):
    """The interface through which `expert_mlp` reads a layer's experts; `ExpertBank` implements it.

    A *slot* is an expert's position in the order in which the experts are computed. `expert_order` has the expert id of
    each slot, `kinds` how it trains; `slots` the slot of each expert that this rank stores, in the order of its routing
    indices.
    """

    expert_order: tuple[int, ...]
    kinds: Sequence[Kind]
    slots: tuple[int, ...]
    activation: Activation
    hooks: ExpertHooks

    def groups(self, dtype: torch.dtype) -> list[range]:
        """Return ranges of slots; the experts of a range are dequantized to `dtype` and multiplied together."""

    def projections(self, slots: range, dtype: torch.dtype) -> tuple[Projection, Projection]:
        """Return the projections (gate_up, down) of the experts of one group, to be computed in `dtype`."""

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that train."""


def expert_mlp(
    experts: ExpertWeights,
    x_TH: Tensor,
    weights_TK: Tensor,
    permutation: Permutation,
    *,
    keep_rows: bool = False,
    norms: Tensor | None = None,
    dense_TE: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of each token's expert outputs: y [T, H] in the dtype of x.

    Differentiable in x, in the routing weights and in the experts' parameters.

    The autograd node is created first and the products fill its output afterwards. When a checkpointed layer is
    recomputed, torch stops once it has the tensors that backward needs, the last of which in most models is saved by
    this node; the experts' products are then not repeated. Kept rows are held by the node of the forward pass, because
    checkpointing would drop saved tensors; its backward frees them.

    Args:
        experts: the layer's experts.
        x_TH: token rows.
        weights_TK: routing weights.
        permutation: the T·K rows sorted by slot.
        keep_rows: keep the gate_up rows of forward for the first backward pass; a second one recomputes them.
        norms: [T, K] float32, overwritten with the L2 norms of the experts' outputs before weighting; None to skip.
        dense_TE: [T, E] weights of experts that were not chosen (`DenseWeights.of`), or None. They do not change y, and
            receive the gradient ⟨dy, E_e(x)⟩, with E_e(x) the output of expert e.
    """
    rows: list[Tensor] = []
    groups = experts.groups(x_TH.dtype)
    parameters = experts.trained_parameters()
    y_TH: Tensor = apply_function(
        _ExpertMlp, experts, permutation, groups, rows, x_TH, weights_TK, dense_TE, *parameters
    )
    with torch.no_grad():
        kept = rows if keep_rows and y_TH.requires_grad else None
        tokens = TokenRows(x_TH, y_TH, permutation, groups, weights_TK.flatten())
        for group in _announced(experts, permutation.groups(groups), keeps=kept is not None):
            _add_group(experts, group, tokens, kept, norms)
        tokens.finish()
    return y_TH


def _add_group(
    experts: ExpertWeights, group: RowGroup, tokens: TokenRows, kept: list[Tensor] | None, norms: Tensor | None
) -> None:
    """Compute the outputs of one group, and add them to `tokens`.

    Unless they are None, the group's gate_up rows [N, O] are appended to `kept`, and the L2 norms of the outputs are
    written to `norms` [T, K].
    """
    gate_up, down = experts.projections(group.slots, tokens.x_TH.dtype)
    gate_up_NO = gate_up.forward(tokens.of(group), group.gemm)
    act_NI = experts.activation.forward(gate_up_NO)
    if kept is not None:
        kept.append(gate_up_NO)
    del gate_up_NO, gate_up
    out_NH = down.forward(act_NI, group.gemm, into=tokens.place(group))
    if norms is not None:
        norms.view(-1).index_copy_(0, group.order, torch.linalg.vector_norm(out_NH, dim=-1, dtype=torch.float32))
    tokens.add(group, out_NH)


def _announced(experts: ExpertWeights, groups: Iterable[RowGroup], *, keeps: bool) -> Iterator[RowGroup]:
    """Yield the groups; call `ExpertHooks.group` with the expert ids before each, and with () after the last.

    A group is passed over if `ExpertHooks.is_written` says so. It is not asked for groups that leave more behind than
    sums: experts that train in full, and rows that are kept (`keeps`).
    """
    hook, is_written = experts.hooks.group, experts.hooks.is_written
    for group in groups:
        if hook is not None:
            hook(experts.expert_order[group.slots.start : group.slots.stop])
        kind = experts.kinds[group.slots.start]
        if is_written is None or keeps or kind == "trained" or not is_written(experts, kind, group.counts):
            yield group
    if hook is not None:
        hook(())


class _ExpertMlp(torch.autograd.Function):
    """Autograd function of `expert_mlp`; its forward leaves the output unfilled."""

    @staticmethod
    def forward(
        ctx: Any,
        experts: ExpertWeights,
        permutation: Permutation,
        groups: list[range],
        rows: list[Tensor],
        x_TH: Tensor,
        weights_TK: Tensor,
        dense_TE: Tensor | None,
        *parameters: nn.Parameter,
    ) -> Tensor:
        ctx.experts, ctx.counts, ctx.top_k = experts, permutation.counts, permutation.top_k
        ctx.groups, ctx.rows = groups, rows  # of each group with tokens, filled later; empty if none are kept
        ctx.save_for_backward(x_TH, weights_TK, permutation.order, permutation.ends)
        return torch.empty_like(x_TH)

    @staticmethod
    def backward(ctx: Any, dy_TH: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, weights_TK, order, ends = ctx.saved_tensors
        experts, permutation = ctx.experts, Permutation(order, ctx.counts, ctx.top_k, ends)
        _, _, _, _, need_x, need_weights, need_dense, *_ = ctx.needs_input_grad
        # before any gradient is handed over, because the gradient hook may update the experts
        ddense_TE = _dense_gradient(experts, x_TH, dy_TH) if need_dense else None
        kept: list[Tensor] = ctx.rows[::-1]
        ctx.rows.clear()  # so that the rows of a group are freed with it
        groups = ctx.groups if kept else experts.groups(x_TH.dtype)
        weights, dx_TH = weights_TK.flatten(), torch.empty_like(x_TH) if need_x else None
        tokens = TokenRows(dy_TH.contiguous(), dx_TH, permutation, groups)
        dweights = torch.empty_like(weights) if need_weights else None
        grads = Gradients(experts.hooks.gradient, complete=all(ctx.counts or [order.shape[0]]))

        def add_group(group: RowGroup) -> None:
            """Add the gradients of one group; its dequantized weights and its kept or recomputed rows are freed on
            return."""
            gemm, row_weights = group.gemm, RowWeights(weights, group.order)
            gate_up, down = experts.projections(group.slots, x_TH.dtype)
            dy_NH = tokens.of(group)
            # before gate_up is dequantized, so that the matrices of only one projection exist at a time
            dact_NI = down.grad_input(dy_NH, gemm)

            x_NH = dequantized = None
            if not kept or gate_up.trains:
                x_NH = kernels.gather_rows(x_TH, group.order, permutation.top_k, None)
            if kept:
                gate_up_NO = kept.pop()
            else:
                dequantized = gate_up.weights()
                gate_up_NO = gate_up.forward(x_NH, gemm, dequantized)
            if not gate_up.trains:
                x_NH = None
            act_NI, dgate_up_NO = experts.activation.backward(gate_up_NO, dact_NI, row_weights, dweights)
            del gate_up_NO, dact_NI
            if dweights is not None and down.bias is not None:
                dweights.index_add_(0, group.order, gemm.dot(dy_NH, down.bias.to(dy_NH.dtype)).to(dweights.dtype))
            if down.trains:
                down.add_gradients(grads, act_NI, dy_NH, gemm, row_weights)
                grads.hand_over(down)
            del act_NI, dy_NH, down
            if dx_TH is not None:
                tokens.add(group, gate_up.grad_input(dgate_up_NO, gemm, dequantized, into=tokens.place(group)))
            if x_NH is not None:
                gate_up.add_gradients(grads, x_NH, dgate_up_NO, gemm)
                grads.hand_over(gate_up)  # last, because the hook may update the weight that was used above

        for group in _announced(experts, permutation.groups(groups), keeps=bool(kept)):
            add_group(group)
        tokens.finish()
        if grads.hook is not None:
            for slots in groups:
                if not permutation.has_rows(slots):
                    for projection in experts.projections(slots, x_TH.dtype):
                        grads.hand_over(projection)
        dweights_TK = None if dweights is None else dweights.view_as(weights_TK)
        of_parameters = map(grads.remaining, experts.trained_parameters())
        return None, None, None, None, dx_TH, dweights_TK, ddense_TE, *of_parameters


def _dense_gradient(experts: ExpertWeights, x_TH: Tensor, dy_TH: Tensor) -> Tensor:
    """Return ⟨dy, E_e(x)⟩ for every token and every expert e: [T, E], in the dtype of x.

    E_e(x) is the output of expert e. It is not computed: the inner product is ⟨W_dᵀ·dy, act⟩ + ⟨dy, b_d⟩. Only one
    expert's rows are in memory at a time.
    """
    gemm = GroupedGemm([len(x_TH)])
    columns = []
    for slot in experts.slots:
        gate_up, down = experts.projections(range(slot, slot + 1), x_TH.dtype)
        dact_TI = down.grad_input(dy_TH, gemm)
        act_TI = experts.activation.forward(gate_up.forward(x_TH, gemm))
        column_T = torch.einsum("ti,ti->t", dact_TI, act_TI)
        if down.bias is not None:
            column_T += gemm.dot(dy_TH, down.bias.to(dy_TH.dtype))
        columns.append(column_T)
        del dact_TI, act_TI
    return torch.stack(columns, 1)
