"""`ExpertBank`: all experts of a layer: frozen and quantized, trained, with LoRA.

An `ExpertBank` replaces the experts module of a transformers model and has the same forward signature. Weights are
stored as [out, in] whatever layout the model uses. The order of the gate and up rows within gate_up, concatenated or
interleaved, stays as in the model.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from moetune.config.schema import Storage
from moetune.experts.activation import recognize
from moetune.experts.context import ExpertContext, Kind, reading
from moetune.experts.mlp import expert_mlp
from moetune.experts.permutation import Permutation
from moetune.experts.projection import FullProjection, LowRank, Projection
from moetune.experts.quantized import QuantizedExperts
from moetune.formats.rounding import Rounding
from moetune.kernels.grouped import is_in_triton, reads_ends
from moetune.kernels.routing import sorted_positions
from moetune.models.moe import ExpertShape, MoeLayer
from moetune.models.selection import Selection
from moetune.run.dtypes import DTYPES

MOST_AT_ONCE = 2**31 - 1  # weights in one dequantization: bitsandbytes counts them in 32 bits

ExpertTensor = Literal["gate_up", "down", "gate_up_bias", "down_bias"]


@dataclass(frozen=True)
class LoraPlan:
    """LoRA on experts of one layer: W + (alpha / rank) · B·A.

    Attributes:
        ids: the experts that get factors.
        split: whether gate and up have a pair of factors each; otherwise gate_up has one pair.
        dtype: in what the factors are stored.
        shared: whether all experts have one A of gate_up and one B of down.
    """

    ids: tuple[int, ...]
    rank: int
    alpha: float
    split: bool = False
    dtype: torch.dtype = torch.float32
    shared: bool = False

    @classmethod
    def of(cls, selection: Selection, layer: MoeLayer) -> "LoraPlan | None":
        """Return which experts of a layer get LoRA, and how; None if none does."""
        lora, ids = selection.lora, selection.lora_experts.get(layer.index, ())
        if lora is None or not ids:
            return None
        rank, shared = selection.ranks[layer.experts], lora.share == "outer"
        return cls(ids, rank, lora.plain_alpha(rank), lora.gate_up == "split", DTYPES[lora.dtype], shared)


@dataclass(frozen=True)
class BankPlan:
    """Training plan of one layer: experts in `trained` train in full, unquantized and without LoRA; others are frozen.

    `lora` adds LoRA to some of the frozen experts; None for no LoRA in this layer.
    """

    trained: tuple[int, ...] = ()
    lora: LoraPlan | None = None

    def of(self, held: Sequence[int]) -> "BankPlan":
        """Return the plan for the expert ids in `held`, in their order; `lora` is None if none of them has LoRA."""
        lora = None if self.lora is None else tuple(expert for expert in held if expert in self.lora.ids)
        return BankPlan(
            tuple(expert for expert in held if expert in self.trained),
            replace(self.lora, ids=lora) if self.lora is not None and lora else None,
        )


def most_together(shape: ExpertShape, memory: int, dtype: torch.dtype) -> int:
    """Return how many experts may be computed together: as many as fit into `memory` bytes, but at least one.

    Each expert counts with the larger of its two matrices, in `dtype`. Together these have at most 2³¹ - 1 weights.
    """
    largest = shape.hidden * shape.gate_up_rows
    return max(1, min(memory // (largest * dtype.itemsize), MOST_AT_ONCE // largest))


def groups_of(kinds: Sequence[Kind], most: int, *, alone: bool = False) -> Iterator[range]:
    """Divide the slots into consecutive ranges of experts of one kind that are computed together; yield the ranges.

    Args:
        kinds: kind of the expert in each slot.
        most: the largest number of experts in a range.
        alone: whether each fully trained expert is a range of its own, whatever `most` says.
    """
    start = 0
    for kind, slots in groupby(kinds):
        count = len(list(slots))
        parts = count if alone and kind == "trained" else -(-count // most)
        yield from (range(*pair) for pair in pairwise(start + count * part // parts for part in range(parts + 1)))
        start += count


class FullExpert(nn.Module):
    """The two projections of one fully trained expert: gate_up [2I, H], or [I, H] without gate, and down [H, I]."""

    def __init__(self, gate_up: FullProjection, down: FullProjection) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down


class ExpertLora(nn.Module):
    """LoRA factors of n experts, as stacked parameters in `LoraPlan.dtype`.

    For a projection with P parts, A is [n, P, r, in] and B is [n, P, out / P, r]; of a factor that all experts
    share, n is 1. P is 2 for gate_up if gate and up have separate factors (`LoraPlan.split`), else 1; P is 1 for down.
    A starts uniform in ±1/√in, as in PEFT, and B starts at zero. One expert has r·(P·H + O) + r·(I + H) parameters,
    where O is the number of gate_up rows (2I, or I without gate).

    Args:
        plan: LoRA of the whole layer.
        held: ids of the experts in `plan.ids` whose factors this rank stores. Random numbers are drawn for all of
            `plan.ids`, so the initial values of an expert do not depend on the rank that stores it.
        rows: number O of gate_up rows.

    Attributes:
        slots: expert id -> index of the expert's factors in dimension 0 of A and B.
        shared: names of the factors that all experts share.
        scale: alpha / rank.
        rows_of_parts: projection (`gate_up`, `down`) -> for each of its parts, the output rows that the part produces.
        is_interleaved: gate and up rows alternate in gate_up.
    """

    def __init__(
        self, plan: LoraPlan, held: Sequence[int], shape: ExpertShape, rows: int, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.slots = {expert: slot for slot, expert in enumerate(held)}
        here = [plan.ids.index(expert) for expert in held]
        self.scale = plan.alpha / plan.rank
        count, rank = len(plan.ids), plan.rank
        whole: tuple[slice, ...] = (slice(None),)
        self.rows_of_parts = {"gate_up": shape.gate_and_up if plan.split and shape.has_gate else whole, "down": whole}
        self.is_interleaved = not shape.is_concatenated
        parts = len(self.rows_of_parts["gate_up"])

        self.shared = ("gate_up_A", "down_B") if plan.shared else ()

        def factor(*size: int, name: str = "") -> nn.Parameter:
            held = 1 if name in self.shared else len(here)
            return nn.Parameter(torch.zeros(held, *size, dtype=plan.dtype, device=device))

        self.gate_up_A = factor(parts, rank, shape.hidden, name="gate_up_A")
        self.gate_up_B, self.down_A = factor(parts, rows // parts, rank), factor(1, rank, shape.intermediate)
        self.down_B = factor(1, shape.hidden, rank, name="down_B")
        for A in (self.gate_up_A, self.down_A):
            bound = 1 / math.sqrt(A.shape[-1])  # kaiming_uniform_(a=√5) of one [r, in] factor, as PEFT draws it
            if here == list(range(count)) or (A is self.gate_up_A and self.shared):
                nn.init.uniform_(A, -bound, bound)
            else:
                A.data.copy_(A.new_empty(count, *A.shape[1:]).uniform_(-bound, bound)[here])

    def of(self, experts: Sequence[int], *, joined: bool) -> tuple[LowRank, LowRank]:
        """Return the low-rank terms (gate_up, down) of C experts, as views of the parameters.

        `experts` are ids whose factors are consecutive in dimension 0 of A and B. With `joined`, one kernel computes
        these terms and the product with W in groups of several experts.
        """
        first = self.slots[experts[0]]
        slots = slice(first, first + len(experts))
        gate_up, down = ((self.scale, self.rows_of_parts[name], joined) for name in ("gate_up", "down"))
        return (
            LowRank(self.gate_up_A, self.gate_up_B, slots, self.is_interleaved, *gate_up, "A" if self.shared else None),
            LowRank(self.down_A, self.down_B, slots, False, *down, "B" if self.shared else None),
        )

    def stored_name(self, factor: str, expert: int) -> str:
        """Return the name under which checkpoints hold an expert's part of a factor such as `down_A`."""
        return factor if factor in self.shared else f"{factor}.{expert}"


class ExpertBank(nn.Module):
    """The E experts of one layer, as a replacement of a transformers experts module.

    Only what trains is a Parameter. Frozen experts are buffers, quantized or in the base dtype. Experts are computed in
    the order of their *slots*: the frozen experts first, each at its index in the quantized matrices, then the fully
    trained experts.

    Args:
        shape: sizes and layout of one expert.
        plan: which experts of the layer train, and how.
        activation: the model's function from gate_up rows [N, O] to act rows [N, I]; differentiable, without
            parameters.
        storage: data type of the frozen experts' weights, such as "nf4".
        double_quant: quantize the scales of NF4 as well.
        dtype: data type of the fully trained experts and of the frozen experts' biases.
        held: ids of the experts that this rank stores; None for all experts of the layer.
        layer: index of the decoder layer.
        context: settings that all banks of a model share. If it has a prefetcher, the frozen experts' weights stay in
            host memory.

    Attributes:
        num_experts: number of experts that this rank stores.
        frozen_slots: expert id -> slot, for the frozen experts.
        expert_order: expert id of each slot.
        slots: slot of each expert, in the order of `held`.
    """

    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    def __init__(
        self,
        shape: ExpertShape,
        plan: BankPlan,
        activation: Callable[[Tensor], Tensor],
        *,
        storage: Storage,
        double_quant: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        held: Sequence[int] | None = None,
        layer: int = 0,
        context: ExpertContext | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.context = layer, context or ExpertContext()
        self.hooks = self.context.hooks
        self.held = tuple(range(shape.num_experts) if held is None else held)
        self.expert_shape, self.plan, self.activation = shape, plan.of(self.held), recognize(activation, shape)
        self.num_experts = len(self.held)
        rows = shape.gate_up_rows
        frozen = [expert for expert in self.held if expert not in plan.trained]
        self.frozen_slots = {expert: slot for slot, expert in enumerate(frozen)}
        self.expert_order = (*frozen, *self.plan.trained)
        self.slots = tuple(map(self.expert_order.index, self.held))

        prefetcher = self.context.prefetcher
        quantized = partial(
            QuantizedExperts,
            len(frozen),
            storage=storage,
            double_quant=double_quant,
            device=device,
            prefetcher=prefetcher,
        )
        split = self.context.split_gate_up and shape.can_be_split
        into_gate_up, into_down = (rows, shape.hidden), (shape.hidden, shape.intermediate)
        self.gate_up = quantized(into_gate_up, pieces=2 if split else 1)
        self.down = quantized(into_down)
        if prefetcher is not None:
            prefetcher.add_layer(layer, (self.gate_up, self.down))

        def full(out: int, into: int) -> FullProjection:
            bias = torch.empty(out, dtype=dtype, device=device) if shape.has_bias else None
            return FullProjection(torch.empty(out, into, dtype=dtype, device=device), bias)

        self.trained = nn.ModuleDict(
            {str(expert): FullExpert(full(*into_gate_up), full(*into_down)) for expert in self.plan.trained}
        )
        for name, size in (("gate_up_bias", rows), ("down_bias", shape.hidden)):
            bias = torch.empty(len(frozen), size, dtype=dtype, device=device) if shape.has_bias else None
            self.register_buffer(name, bias)
        self.lora: ExpertLora | None = None
        if plan.lora is not None:
            here = () if self.plan.lora is None else self.plan.lora.ids
            lora = ExpertLora(plan.lora, here, shape, rows, device)
            self.lora = lora if here else None
        self.kinds: Sequence[Kind] = [self._kind(expert) for expert in self.expert_order]
        self._groups: dict[tuple[torch.dtype, int, bool], list[range]] = {}

    @torch.no_grad()
    def put_(self, expert: int, name: ExpertTensor, tensor: Tensor) -> None:
        """Copy one expert's weight [out, in] or bias [out] into the bank; a frozen expert's weight is quantized.

        Does nothing for a tensor on the meta device and for an expert that this rank does not store.
        """
        if tensor.is_meta or expert not in self.held:
            return
        is_bias = name.endswith("_bias")
        projection = name.removesuffix("_bias")
        if expert not in self.frozen_slots:
            full = getattr(self.trained[str(expert)], projection)
            (full.bias if is_bias else full.weight).copy_(tensor)
        elif is_bias:
            getattr(self, name)[self.frozen_slots[expert]].copy_(tensor)
        else:
            slot, rounding = self.frozen_slots[expert], self._rounding(tensor.shape[1])
            if rounding is not None and not rounding.keep and self.kinds[slot] == "frozen":
                pieces = 1 if name == "down" else self.gate_up.pieces
                tensor = rounding.rounded([tensor.float()], 1, torch.float32, pieces=pieces)[0]
            getattr(self, projection).quantize_(slot, tensor)

    @torch.no_grad()
    def put_quantized_(self, expert: int, name: ExpertTensor, *pieces: Mapping[str, Tensor]) -> None:
        """Store the weight `name`, "gate_up" or "down", of a frozen expert as a checkpoint has quantized it.

        Each of `pieces` maps buffer names, such as `data` and `absmax`, to tensors. There are two pieces if gate and up
        are quantized separately (`ExpertContext.split_gate_up`), else one. An expert that is not frozen, or that this
        rank does not store, raises `KeyError`.
        """
        getattr(self, name).put_quantized_(self.frozen_slots[expert], *pieces)

    def groups(self, dtype: torch.dtype) -> list[range]:
        """Return consecutive ranges of slots; the experts of a range are dequantized and multiplied together.

        The experts of a group are all frozen, all frozen with LoRA, or all fully trained. A group has at least one
        expert, and at most as many as fit into `context.expert_memory` bytes (`most_together`). With a gradient hook,
        each fully trained expert is a group of its own, because a group's gradients are one tensor.
        """
        key = dtype, self.context.expert_memory, self.hooks.gradient is not None
        if key not in self._groups:
            most = most_together(self.expert_shape, self.context.expert_memory, dtype)
            self._groups[key] = list(groups_of(self.kinds, most, alone=key[2]))
        return self._groups[key]

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that train, as `parameters` yields them, in a tenth of the time."""
        modules: list[Any] = [part for full in self.trained.values() for part in full.children()]
        if self.lora is not None:
            modules.append(self.lora)
        return [parameter for module in modules for parameter in module._parameters.values() if parameter is not None]

    def counts_rows(self, dtype: torch.dtype) -> bool:
        """Return whether the host must know how many rows each expert receives, for which it waits.

        It need not if all experts are one group: then shapes do not depend on them, and kernels find each expert's rows
        on the GPU. Trained experts, which may be groups of their own in backward, and torch's operations need them.
        """
        shape, capability = self.expert_shape, self.context.capability
        features = shape.hidden, shape.intermediate, shape.gate_up_rows
        return (
            capability is None
            or self.num_experts == 1
            or bool(self.plan.trained)
            or not reads_ends(capability, dtype, *features)
            or len(self.groups(dtype)) > 1
        )

    def _kind(self, expert: int) -> Kind:
        """Return how an expert trains."""
        if expert not in self.frozen_slots:
            return "trained"
        return "lora" if self.lora is not None and expert in self.lora.slots else "frozen"

    def projections(self, slots: range, dtype: torch.dtype) -> tuple[Projection, Projection]:
        """Return the projections (gate_up, down) of one of the `groups`.

        Weights are dequantized or cast to `dtype` when a projection runs, not here.
        """
        experts = self.expert_order[slots.start : slots.stop]
        kind = self.kinds[slots.start]
        if kind == "trained":
            fulls = [cast(FullExpert, self.trained[str(expert)]) for expert in experts]
            return _trained([full.gate_up for full in fulls], dtype), _trained([full.down for full in fulls], dtype)
        which = slice(slots.start, slots.stop)
        gate_up_lora = down_lora = None
        if kind == "lora" and self.lora is not None and not self.hooks.without_lora:
            capability = self.context.capability
            gate_up_lora, down_lora = self.lora.of(
                experts, joined=capability is not None and is_in_triton(capability, dtype)
            )

        def projection(stack: QuantizedExperts, bias: Tensor | None, lora: LowRank | None) -> Projection:
            of_group = None if bias is None else bias[which]
            rounding = self._rounding(stack.shape[1]) if kind == "lora" else None
            if rounding is None:
                return Projection(partial(stack.matrices, which, dtype), of_group, (), lora)
            weights = partial(stack.merged, which, dtype, rounding, None if lora is None else lora.merge_)
            return Projection(weights, of_group, (), None if lora is None else replace(lora, is_merged=True))

        return (
            projection(self.gate_up, self.gate_up_bias, gate_up_lora),
            projection(self.down, self.down_bias, down_lora),
        )

    def _rounding(self, columns: int) -> Rounding | None:
        """Return how matrices with so many columns are rounded under `train.merge_into`; None if they are not."""
        rounding = self.context.rounding
        return rounding if rounding is not None and rounding.is_of(columns) else None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Apply each token's experts: return the sums [T, H] of their outputs times the routing weights [T, K].

        `hidden_states` is [T, H]. `top_k_index` [T, K] holds expert ids if there is a dispatcher, else positions in
        `held`, which are the ids if this rank stores all experts.
        """
        hooks, dispatcher, prefetcher = self.hooks, self.context.dispatcher, self.context.prefetcher
        x_SH, weights, received, dense = hidden_states, top_k_weights, None, None
        if dispatcher is not None:
            received = dispatcher.dispatch(self.layer, hidden_states, top_k_index, top_k_weights, hooks)
            permutation = self.permutation(received.slots_S1, received.counts)
            x_SH, weights = received.rows_SH, received.rows_SH.new_ones(len(received.rows_SH), 1)
        else:
            order, ends_E = sorted_positions(self._slots_of(top_k_index).flatten(), self.num_experts)
            permutation = Permutation(order, None, top_k_index.shape[-1], ends_E)
            if self.counts_rows(hidden_states.dtype):
                read = reading(ends_E, self.slots, top_k_index.numel())
                counts = hooks.count_rows(self.layer, top_k_index, self.num_experts, read)
                permutation = Permutation(order, self._by_slot(counts), top_k_index.shape[-1])
            if self.context.dense is not None:
                dense = self.context.dense.of(self.layer, top_k_index, top_k_weights)
        norms = None
        if hooks.norms is not None:
            norms = torch.empty(weights.shape, dtype=torch.float32, device=weights.device)
        keep_rows = self.layer in self.context.keep_rows and not hooks.recomputes
        output = expert_mlp(self, x_SH, weights, permutation, keep_rows=keep_rows, norms=norms, dense_TE=dense)
        if prefetcher is not None:
            prefetcher.used(self.layer, again=output.requires_grad)
        if dispatcher is not None and received is not None:
            norms = None if norms is None else dispatcher.combine_norms(norms.flatten(), received)
            output = dispatcher.combine(output, received).to(hidden_states.dtype)
        if hooks.norms is not None and norms is not None:
            hooks.norms(self.layer, norms)
        return output

    def permutation(self, held_TK: Tensor, counts: list[int]) -> Permutation:
        """Return the permutation that sorts token rows by the slot of their expert.

        `held_TK` are the chosen experts as positions in `held`; `counts` says how often each position occurs.
        """
        order, _ = sorted_positions(self._slots_of(held_TK).flatten(), self.num_experts)
        return Permutation(order, self._by_slot(counts), held_TK.shape[-1])

    def _slots_of(self, held_TK: Tensor) -> Tensor:
        """Return the slots [T, K] of experts given as positions in `held`."""
        if self.expert_order == self.held:
            return held_TK
        slots = torch.tensor(self.slots, pin_memory=held_TK.is_cuda)
        return slots.to(held_TK.device, non_blocking=True)[held_TK]

    def _by_slot(self, counts: list[int]) -> list[int]:
        """Return the counts of the experts in `held` in the order of their slots."""
        return [count for _, count in sorted(zip(self.slots, counts, strict=True))]

    def extra_repr(self) -> str:
        lora = f", LoRA r{self.plan.lora.rank} on {len(self.plan.lora.ids)}" if self.plan.lora else ""
        return f"{self.num_experts} experts, {len(self.plan.trained)} trained in full{lora}"


def _trained(fulls: Sequence[FullProjection], dtype: torch.dtype) -> Projection:
    """Return the projection of fully trained experts, with weights cast to `dtype` when it runs."""
    biases = [full.bias for full in fulls if full.bias is not None]
    return Projection(
        lambda: _stacked([full.weight.to(dtype) for full in fulls]), _stacked(biases) if biases else None, tuple(fulls)
    )


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors stacked along a new first dimension; of a single tensor a view."""
    return torch.stack(list(tensors)) if len(tensors) > 1 else tensors[0][None]
