"""One layer's experts: any mixture of frozen packed ones, fully trained ones, and LoRA on any of the frozen.

Takes the place of a transformers experts module and keeps its signature. Weights are held [out, in] whatever the
model's own layout; how gate and up lie in the rows of gate_up (one after the other, or interleaved) stays the model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from moetune.experts.activation import Activation
from moetune.experts.links import BankLinks
from moetune.experts.mlp import expert_mlp
from moetune.experts.projection import FullProjection, LowRank, Projection, Weighted
from moetune.experts.quantized import QuantizedExperts, Storage
from moetune.experts.routing import Group, Routing
from moetune.models.moe import ExpertShape

_MOST_AT_ONCE = 2**31 - 1  # weights: bitsandbytes counts them in 32 bits

Part = Literal["gate_up", "down", "gate_up_bias", "down_bias"]


@dataclass(frozen=True)
class LoraPlan:
    """Low-rank factors on the experts `ids`. With `split`, gate and up have an A each; otherwise they share one."""

    ids: tuple[int, ...]
    rank: int
    alpha: float
    split: bool = False


@dataclass(frozen=True)
class BankPlan:
    """What becomes of one layer's experts: `trained` ids in full precision, the rest frozen, LoRA on some of those."""

    trained: tuple[int, ...] = ()
    lora: LoraPlan | None = None

    def of(self, held: Sequence[int]) -> BankPlan:
        """The share of a bank that holds these experts only, in their order."""
        lora = None if self.lora is None else tuple(expert for expert in held if expert in self.lora.ids)
        return BankPlan(
            tuple(expert for expert in held if expert in self.trained),
            replace(self.lora, ids=lora) if self.lora is not None and lora else None,
        )


class FullExpert(nn.Module):
    """An expert that trains whole: `gate_up` [O, H] and `down` [H, I]."""

    def __init__(self, gate_up: FullProjection, down: FullProjection) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down


class ExpertLora(nn.Module):
    """Factors of n experts: A [n, parts, r, in], B [n, parts, out / parts, r]; float32, B starts at zero.

    Parameters of one expert: r·(parts·H + O) + r·(I + H), where parts is 2 for a split gate and up and 1 otherwise.

    Args:
        held: those of the plan's experts that are here. All are drawn, so that an expert begins with the same values
            on whichever rank it is.
    """

    def __init__(
        self, plan: LoraPlan, held: Sequence[int], shape: ExpertShape, rows: int, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.slots = {expert: slot for slot, expert in enumerate(held)}
        here = [plan.ids.index(expert) for expert in held]
        self.scale = plan.alpha / plan.rank
        count, rank = len(plan.ids), plan.rank
        self.gate_up_rows = _gate_and_up(shape) if plan.split and shape.has_gate else (slice(None),)
        self.is_interleaved = not shape.is_concatenated
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
        """The low-rank terms of (gate_up, down) of neighbours."""
        first = self.slots[experts[0]]
        slots = slice(first, first + len(experts))
        gate_up = LowRank(self.gate_up_A, self.gate_up_B, slots, self.is_interleaved, self.scale)
        return gate_up, LowRank(self.down_A, self.down_B, slots, False, self.scale)


def _gate_and_up(shape: ExpertShape) -> tuple[slice, slice]:
    """Where gate and up lie in the rows of gate_up."""
    if shape.is_concatenated:
        return slice(0, shape.intermediate), slice(shape.intermediate, None)
    return slice(0, None, 2), slice(1, None, 2)


def _trained(fulls: tuple[FullProjection, ...], dtype: torch.dtype) -> Projection:
    biases = [full.bias for full in fulls if full.bias is not None]
    return Projection(
        lambda: _stacked([full.weight.to(dtype) for full in fulls]), _stacked(biases) if biases else None, fulls
    )


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)) if len(tensors) > 1 else tensors[0][None]


class ExpertBank(nn.Module):
    """E experts of one layer. Only what trains is a Parameter; the frozen are buffers in base precision.

    Args:
        shape: sizes and layout of one expert.
        plan: which experts train, and how.
        activation: gate_up rows [N, O] -> act rows [N, I], differentiable, without parameters of its own.
        storage: base precision of the frozen experts.
        dtype: of the fully trained experts and of frozen biases.
        held: ids of this rank's experts, in the order of their slots; by default all. Other ranks have the rest.
        layer: the layer's index.
        links: what the banks of the model share with what is around them. With a prefetcher, the frozen experts'
            weights stay on the host.

    Attributes:
        num_experts: how many this rank holds.
        in_slot_order: their ids in the order in which they are worked on. Experts that train in full come last, so
            that the others are contiguous.
        slot_of: expert id -> its position in that order.
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
        links: BankLinks | None = None,
    ) -> None:
        super().__init__()
        self.layer, self.links = layer, links or BankLinks()
        self.held = tuple(range(shape.num_experts) if held is None else held)
        self.expert_shape, self.plan, self.activation = shape, plan.of(self.held), activation
        self.gate = Activation.of(activation, shape)
        self.num_experts = len(self.held)
        rows = shape.intermediate * (2 if shape.has_gate else 1)
        frozen = [expert for expert in self.held if expert not in plan.trained]
        self.frozen_slots = {expert: slot for slot, expert in enumerate(frozen)}
        self.in_slot_order = (*frozen, *self.plan.trained)
        self.slot_of = {expert: turn for turn, expert in enumerate(self.in_slot_order)}
        self._slots = [self.held.index(expert) for expert in self.in_slot_order]

        def packed(out: int, into: int, pieces: int = 1) -> QuantizedExperts:
            return QuantizedExperts(
                len(frozen),
                (out, into),
                storage,
                double_quant=double_quant,
                pieces=pieces,
                device=device,
                prefetcher=self.links.prefetcher,
            )

        apart = self.links.gate_up_apart and shape.has_gate and shape.is_concatenated
        self.gate_up = packed(rows, shape.hidden, 2 if apart else 1)
        self.down = packed(shape.hidden, shape.intermediate)
        if self.links.prefetcher is not None:
            self.links.prefetcher.add_layer(layer, (self.gate_up, self.down))

        def full(out: int, into: int) -> FullProjection:
            bias = torch.empty(out, dtype=dtype, device=device) if shape.has_bias else None
            return FullProjection(torch.empty(out, into, dtype=dtype, device=device), bias)

        self.trained = nn.ModuleDict(
            {
                str(expert): FullExpert(full(rows, shape.hidden), full(shape.hidden, shape.intermediate))
                for expert in self.plan.trained
            }
        )
        for name, size in (("gate_up_bias", rows), ("down_bias", shape.hidden)):
            bias = torch.empty(len(frozen), size, dtype=dtype, device=device) if shape.has_bias else None
            self.register_buffer(name, bias)
        self.lora: ExpertLora | None = None
        if plan.lora is not None:
            here = () if self.plan.lora is None else self.plan.lora.ids
            lora = ExpertLora(plan.lora, here, shape, rows, device)
            self.lora = lora if here else None
        kinds = groupby(range(self.num_experts), key=lambda turn: self._kind(self.in_slot_order[turn]))
        self._runs = [(kind, list(turns)) for kind, turns in kinds]

    @torch.no_grad()
    def put_(self, expert: int, part: Part, tensor: Tensor) -> None:
        """Stores one expert's weight [out, in] or bias: packed if it is frozen, as it is if it trains. A meta tensor
        has no values and stores none; nor does one of an expert that is not here."""
        if tensor.is_meta or expert not in self.held:
            return
        is_bias = part.endswith("_bias")
        name = part.removesuffix("_bias")
        if expert not in self.frozen_slots:
            projection = getattr(self.trained[str(expert)], name)
            (projection.bias if is_bias else projection.weight).copy_(tensor)
        elif is_bias:
            getattr(self, part)[self.frozen_slots[expert]].copy_(tensor)
        else:
            getattr(self, name).quantize_(self.frozen_slots[expert], tensor)

    @torch.no_grad()
    def put_quantized_(self, expert: int, part: Part, *pieces: Mapping[str, Tensor]) -> None:
        """Stores a frozen expert's weight as a checkpoint has it packed: of gate and up, each if they are apart."""
        getattr(self, part).put_quantized_(self.frozen_slots[expert], *pieces)

    def groups(self, dtype: torch.dtype) -> Iterator[range]:
        """Neighbours in turn, whose experts are unpacked and multiplied together: of one kind, and as many as have
        room in `expert_memory`, one at least. An expert that trains in full is alone where its gradients leave alone,
        because a group's are one tensor."""
        largest = max(math.prod(self.gate_up.shape), math.prod(self.down.shape))
        most = max(1, min(self.links.expert_memory // (largest * dtype.itemsize), _MOST_AT_ONCE // largest))
        for kind, turns in self._runs:
            is_alone = kind == "trained" and self.links.eager_gradient_hook is not None
            parts = len(turns) if is_alone else -(-len(turns) // most)
            ends = [turns[0] + len(turns) * part // parts for part in range(parts + 1)]
            yield from (range(*pair) for pair in pairwise(ends))

    def _kind(self, expert: int) -> Literal["trained", "lora", "frozen"]:
        if expert not in self.frozen_slots:
            return "trained"
        return "lora" if self.lora is not None and expert in self.lora.slots else "frozen"

    def projections(self, turns: range, dtype: torch.dtype) -> tuple[Projection, Projection]:
        """(gate_up, down) of a group, computing in `dtype`."""
        experts = self.in_slot_order[turns.start : turns.stop]
        kind = self._kind(experts[0])
        if kind == "trained":
            fulls = [cast(FullExpert, self.trained[str(expert)]) for expert in experts]
            of_parts = (tuple(full.gate_up for full in fulls), tuple(full.down for full in fulls))
            return _trained(of_parts[0], dtype), _trained(of_parts[1], dtype)
        first = self.frozen_slots[experts[0]]
        which = slice(first, first + len(experts))
        gate_up_lora, down_lora = self.lora.of(experts) if kind == "lora" and self.lora is not None else (None, None)
        gate_up_bias = None if self.gate_up_bias is None else self.gate_up_bias[which]
        down_bias = None if self.down_bias is None else self.down_bias[which]
        return (
            Projection(lambda: self.gate_up.matrices(which, dtype), gate_up_bias, (), gate_up_lora),
            Projection(lambda: self.down.matrices(which, dtype), down_bias, (), down_lora),
        )

    def watched(self, groups: Iterable[Group]) -> Iterator[Group]:
        """Tells whoever watches of each."""
        watch = self.links.expert_watch
        for group in groups:
            if watch is not None:
                watch(self.in_slot_order[group.turns.start : group.turns.stop])
            yield group
        if watch is not None:
            watch(())

    def act(self, gate_up_NO: Tensor) -> Tensor:
        """act rows [N, I], without a gradient."""
        return self.activation(gate_up_NO) if self.gate is None else self.gate.forward(gate_up_NO)

    def act_backward(
        self, gate_up_NO: Tensor, dact_NI: Tensor, weighted: Weighted, dweights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(act, the weighted gradient of gate_up), of gradients of act that are not weighted yet; `dweights` [T·K] gets
        ⟨dact, act⟩. Uses up what it is given."""
        if self.gate is not None:
            self.gate.backward_(gate_up_NO, dact_NI, weighted, dweights)
            return dact_NI, gate_up_NO
        gate_up_NO.requires_grad_()
        with torch.enable_grad():
            act_NI = self.activation(gate_up_NO)
        edge, act_NI = get_gradient_edge(act_NI), act_NI.detach()  # the way back does not need the rows
        if dweights is not None:
            dweights.index_copy_(0, weighted.order, torch.einsum("ni,ni->n", dact_NI, act_NI).to(dweights.dtype))
        (dgate_up_NO,) = torch.autograd.grad(edge, gate_up_NO, dact_NI.mul_(weighted.column(dact_NI.dtype)))
        return act_NI, dgate_up_NO

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Routes tokens [T, H] to their experts [T, K] with weights [T, K]; returns [T, H]."""
        if self.links.exchange is not None:
            return self.links.exchange(self, hidden_states, top_k_index, top_k_weights)
        counts = self.links.count_rows(self.layer, top_k_index, self.num_experts)
        norms = self.links.room_for_norms(top_k_index)
        dense = None if self.links.dense is None else self.links.dense.of(self.layer, top_k_index, top_k_weights)
        output = self.run(hidden_states, top_k_weights, self.routing(top_k_index, counts), norms, dense)
        if self.links.norm_watch is not None and norms is not None:
            self.links.norm_watch(self.layer, norms)
        return output

    def routing(self, slots_TK: Tensor, counts: list[int]) -> Routing:
        """Of the chosen slots, of which each is chosen `counts` times."""
        if self.in_slot_order == self.held:
            return Routing.of(slots_TK, counts)
        turns = torch.tensor([self.slot_of[expert] for expert in self.held], pin_memory=slots_TK.is_cuda)
        slots_TK = turns.to(slots_TK.device, non_blocking=True)[slots_TK]
        return Routing.of(slots_TK, [counts[slot] for slot in self._slots])

    def run(
        self,
        hidden_states: Tensor,
        weights: Tensor,
        routing: Routing,
        norms: Tensor | None = None,
        dense: Tensor | None = None,
    ) -> Tensor:
        """This rank's experts, on the tokens [T, H] that are for them; `routing` speaks of their turns. `norms` [T, K]
        is filled with ‖expert output‖₂; `dense` are the weights [T, E] of experts that were not chosen."""
        output = expert_mlp(self, hidden_states, weights, routing, norms, dense)
        if self.links.prefetcher is not None:
            self.links.prefetcher.used(self.gate_up, again=output.requires_grad)
        return output

    def extra_repr(self) -> str:
        lora = f", LoRA r{self.plan.lora.rank} on {len(self.plan.lora.ids)}" if self.plan.lora else ""
        return f"{self.num_experts} experts, {len(self.plan.trained)} trained in full{lora}"
