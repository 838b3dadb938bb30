"""One layer's experts: any mixture of frozen quantized ones, fully trained ones, and LoRA on any of the frozen.

An `ExpertBank` replaces a transformers experts module and has its signature. Weights are stored [out, in] whatever the
model's own layout; the order of gate and up in the rows of gate_up (concatenated or interleaved) stays the model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from typing import Literal, cast

import torch
from torch import Tensor, nn

from moetune.experts.activation import recognize
from moetune.experts.context import ExpertContext
from moetune.experts.mlp import expert_mlp
from moetune.experts.permutation import Permutation
from moetune.experts.projection import FullProjection, LowRank, Projection
from moetune.experts.quantized import QuantizedExperts, Storage
from moetune.models.moe import ExpertShape

_MOST_AT_ONCE = 2**31 - 1  # weights: bitsandbytes counts them in 32 bits

ExpertTensor = Literal["gate_up", "down", "gate_up_bias", "down_bias"]


@dataclass(frozen=True)
class LoraPlan:
    """Low-rank factors on the experts `ids`. With `split`, gate and up have an A each; otherwise they share one."""

    ids: tuple[int, ...]
    rank: int
    alpha: float
    split: bool = False


@dataclass(frozen=True)
class BankPlan:
    """How one layer's experts train: those in `trained` in full precision, the rest frozen, LoRA on some of these."""

    trained: tuple[int, ...] = ()
    lora: LoraPlan | None = None

    def of(self, held: Sequence[int]) -> BankPlan:
        """Return the plan of these experts alone, in their order."""
        lora = None if self.lora is None else tuple(expert for expert in held if expert in self.lora.ids)
        return BankPlan(
            tuple(expert for expert in held if expert in self.trained),
            replace(self.lora, ids=lora) if self.lora is not None and lora else None,
        )


class FullExpert(nn.Module):
    """A fully trained expert: `gate_up` [O, H] and `down` [H, I]."""

    def __init__(self, gate_up: FullProjection, down: FullProjection) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down


class ExpertLora(nn.Module):
    """Factors of n experts: A [n, parts, r, in], B [n, parts, out / parts, r]; float32, B starts at zero.

    Parameters of one expert: r·(parts·H + O) + r·(I + H), where parts is 2 for a split gate and up and 1 otherwise.

    Args:
        held: those of the plan's experts that this rank holds. All are drawn, so that an expert starts with the same
            values on any rank.

    Attributes:
        slots: expert id -> its index in the factors.
        gate_up_rows: rows of gate_up of each part.
    """

    def __init__(
        self, plan: LoraPlan, held: Sequence[int], shape: ExpertShape, rows: int, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.slots = {expert: slot for slot, expert in enumerate(held)}
        here = [plan.ids.index(expert) for expert in held]
        self.scale = plan.alpha / plan.rank
        count, rank = len(plan.ids), plan.rank
        self.gate_up_rows: tuple[slice, ...] = (slice(None),)
        self.is_interleaved = not shape.is_concatenated
        if plan.split and shape.has_gate:
            middle = shape.intermediate
            interleaved, concatenated = (slice(0, None, 2), slice(1, None, 2)), (slice(0, middle), slice(middle, None))
            self.gate_up_rows = interleaved if self.is_interleaved else concatenated
        parts = len(self.gate_up_rows)

        def factor(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(len(here), *size, dtype=torch.float32, device=device))

        self.gate_up_A, self.gate_up_B = factor(parts, rank, shape.hidden), factor(parts, rows // parts, rank)
        self.down_A, self.down_B = factor(1, rank, shape.intermediate), factor(1, shape.hidden, rank)
        for A in (self.gate_up_A, self.down_A):
            bound = 1 / math.sqrt(A.shape[-1])  # kaiming_uniform_(a=√5) of one [r, in] factor, as PEFT draws it
            if here == list(range(count)):
                nn.init.uniform_(A, -bound, bound)
            else:
                A.data.copy_(A.new_empty(count, *A.shape[1:]).uniform_(-bound, bound)[here])

    def of(self, experts: Sequence[int]) -> tuple[LowRank, LowRank]:
        """Return the low-rank terms of (gate_up, down) of experts in neighbouring slots."""
        first = self.slots[experts[0]]
        slots = slice(first, first + len(experts))
        gate_up = LowRank(self.gate_up_A, self.gate_up_B, slots, self.is_interleaved, self.scale)
        return gate_up, LowRank(self.down_A, self.down_B, slots, False, self.scale)


class ExpertBank(nn.Module):
    """E experts of one layer. Only what trains is a Parameter; the frozen are buffers in base precision.

    Experts are computed in the order of their *slots*: first the frozen ones, each at its index in the quantized
    matrices, then the fully trained ones.

    Args:
        shape: sizes and layout of one expert.
        plan: which experts train, and how.
        activation: gate_up rows [N, O] -> act rows [N, I], differentiable, without parameters of its own.
        storage: base precision of the frozen experts.
        dtype: of the fully trained experts and of frozen biases.
        held: ids of this rank's experts; by default all. `top_k_index` counts positions in it.
        layer: the layer's index.
        context: shared by the banks of a model. With a prefetcher, the frozen experts' weights stay on the host.

    Attributes:
        num_experts: experts that this rank holds.
        frozen_slots: expert id -> slot, of the frozen ones.
        expert_order: expert id of each slot.
        slots: slot of each expert of `held`.
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
        rows = shape.intermediate * (2 if shape.has_gate else 1)
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
        split = self.context.split_gate_up and shape.has_gate and shape.is_concatenated
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
        kinds = groupby(range(self.num_experts), key=lambda slot: self._kind(self.expert_order[slot]))
        self._runs = [(kind, list(slots)) for kind, slots in kinds]

    @torch.no_grad()
    def put_(self, expert: int, name: ExpertTensor, tensor: Tensor) -> None:
        """Store one expert's weight [out, in] or bias: quantized if frozen, as it is if trained. Ignores a meta tensor,
        which has no values, and experts of other ranks."""
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
            getattr(self, projection).quantize_(self.frozen_slots[expert], tensor)

    @torch.no_grad()
    def put_quantized_(self, expert: int, name: ExpertTensor, *pieces: Mapping[str, Tensor]) -> None:
        """Store a frozen expert's weight as a checkpoint has it quantized; two pieces for gate and up stored apart."""
        getattr(self, name).put_quantized_(self.frozen_slots[expert], *pieces)

    def groups(self, dtype: torch.dtype) -> Iterator[range]:
        """Yield neighbouring slots, whose experts are dequantized and multiplied together.

        Experts of a group are of one kind and as many as fit into `expert_memory`, at least one. With a gradient hook,
        fully trained experts are alone, because a group's gradients are one tensor.
        """
        largest = max(math.prod(self.gate_up.shape), math.prod(self.down.shape))
        most = max(1, min(self.context.expert_memory // (largest * dtype.itemsize), _MOST_AT_ONCE // largest))
        for kind, slots in self._runs:
            is_alone = kind == "trained" and self.hooks.gradient is not None
            parts = len(slots) if is_alone else -(-len(slots) // most)
            ends = [slots[0] + len(slots) * part // parts for part in range(parts + 1)]
            yield from (range(*pair) for pair in pairwise(ends))

    def _kind(self, expert: int) -> Literal["trained", "lora", "frozen"]:
        if expert not in self.frozen_slots:
            return "trained"
        return "lora" if self.lora is not None and expert in self.lora.slots else "frozen"

    def projections(self, slots: range, dtype: torch.dtype) -> tuple[Projection, Projection]:
        """Return (gate_up, down) of a group, computing in `dtype`."""
        experts = self.expert_order[slots.start : slots.stop]
        kind = self._kind(experts[0])
        if kind == "trained":
            fulls = [cast(FullExpert, self.trained[str(expert)]) for expert in experts]
            return _trained([full.gate_up for full in fulls], dtype), _trained([full.down for full in fulls], dtype)
        which = slice(slots.start, slots.stop)
        gate_up_lora, down_lora = self.lora.of(experts) if kind == "lora" and self.lora is not None else (None, None)
        gate_up_bias = None if self.gate_up_bias is None else self.gate_up_bias[which]
        down_bias = None if self.down_bias is None else self.down_bias[which]
        return (
            Projection(partial(self.gate_up.matrices, which, dtype), gate_up_bias, (), gate_up_lora),
            Projection(partial(self.down.matrices, which, dtype), down_bias, (), down_lora),
        )

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Route tokens [T, H] to their experts [T, K] with weights [T, K]; return [T, H]."""
        dispatcher, hooks = self.context.dispatcher, self.hooks
        if dispatcher is not None:
            received = dispatcher.dispatch(self.layer, hidden_states, top_k_index, top_k_weights, hooks)
            permutation = self.permutation(received.slots_S1, received.counts)
            norms = self._norms(permutation.order[:, None])
            ones = received.rows_SH.new_ones(len(received.rows_SH), 1)
            output = self._run(received.rows_SH, ones, permutation, norms)
            if hooks.norms is not None and norms is not None:
                hooks.norms(self.layer, dispatcher.combine_norms(norms.flatten(), received.state))
            return dispatcher.combine(output, received.state).to(hidden_states.dtype)
        counts = hooks.count_rows(self.layer, top_k_index, self.num_experts)
        norms, dense = self._norms(top_k_index), None
        if self.context.dense is not None:
            dense = self.context.dense.of(self.layer, top_k_index, top_k_weights)
        output = self._run(hidden_states, top_k_weights, self.permutation(top_k_index, counts), norms, dense)
        if hooks.norms is not None and norms is not None:
            hooks.norms(self.layer, norms)
        return output

    def _norms(self, like: Tensor) -> Tensor | None:
        """A tensor for the norms of the experts' outputs, float32 in the shape of ids; None if no hook wants them."""
        return None if self.hooks.norms is None else torch.empty(like.shape, dtype=torch.float32, device=like.device)

    def permutation(self, held_TK: Tensor, counts: list[int]) -> Permutation:
        """Sort chosen positions in `held`, of which each occurs `counts` times, by slot."""
        if self.expert_order == self.held:
            return Permutation.of(held_TK, counts)
        slots = torch.tensor(self.slots, pin_memory=held_TK.is_cuda)
        slots_TK = slots.to(held_TK.device, non_blocking=True)[held_TK]
        return Permutation.of(slots_TK, [count for _, count in sorted(zip(self.slots, counts, strict=True))])

    def _run(
        self,
        x_TH: Tensor,
        weights_TK: Tensor,
        permutation: Permutation,
        norms: Tensor | None = None,
        dense_TE: Tensor | None = None,
    ) -> Tensor:
        """Run this rank's experts; arguments as in `expert_mlp`."""
        keep_rows, prefetcher = self.context.keep_rows, self.context.prefetcher
        output = expert_mlp(self, x_TH, weights_TK, permutation, keep_rows=keep_rows, norms=norms, dense_TE=dense_TE)
        if prefetcher is not None:
            prefetcher.used(self.gate_up, again=output.requires_grad)
        return output

    def extra_repr(self) -> str:
        lora = f", LoRA r{self.plan.lora.rank} on {len(self.plan.lora.ids)}" if self.plan.lora else ""
        return f"{self.num_experts} experts, {len(self.plan.trained)} trained in full{lora}"


def _trained(fulls: Sequence[FullProjection], dtype: torch.dtype) -> Projection:
    biases = [full.bias for full in fulls if full.bias is not None]
    return Projection(
        lambda: _stacked([full.weight.to(dtype) for full in fulls]), _stacked(biases) if biases else None, tuple(fulls)
    )


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)) if len(tensors) > 1 else tensors[0][None]
