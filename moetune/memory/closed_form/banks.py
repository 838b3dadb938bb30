"""`Bank`: which experts of a layer train; `probes_of`: runs with few trained experts, from which others are derived."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property

from moetune.config.schema import ExpertsConfig
from moetune.experts.bank import groups_of, most_together
from moetune.experts.context import Kind
from moetune.parallel.coordinates import expert_shards
from moetune.run.names import parts_by_name
from moetune.run.placement import balance_experts
from moetune.run.resolve import ResolvedRun

_FIRST = 3
"""Fewest trained experts of a probe run: its first and last stand for one expert each, its second for all others."""


@dataclass(frozen=True)
class Bank:
    """Which of a layer's experts on one rank train, and how.

    Attributes:
        held: ids of the experts on this rank, ascending.
        trained: ids of those that train in full.
        lora: ids of those with LoRA; all others are frozen.
        most: largest number of experts that are computed together.
    """

    held: tuple[int, ...]
    trained: tuple[int, ...]
    lora: tuple[int, ...]
    most: int

    def groups(self, *, alone: bool) -> list[tuple[Kind, tuple[int, ...]]]:
        """Return (kind, expert ids) of each group of experts that is computed together, in order: those trained in full
        come last. With `alone`, each of these is a group of its own."""
        trained, lora = set(self.trained), set(self.lora)
        frozen = [expert for expert in self.held if expert not in trained]
        order = [*frozen, *self.trained]
        kinds: list[Kind] = ["lora" if expert in lora else "frozen" for expert in frozen]
        kinds += ["trained"] * len(self.trained)
        slots = groups_of(kinds, self.most, alone=alone)
        return [(kinds[of[0]], tuple(order[of.start : of.stop])) for of in slots]

    @cached_property
    def branches(self) -> Hashable:
        """Key that is equal for banks that take the same code path: kinds of their groups, and for each kind whether
        groups of one expert occur; whether the trained experts come last; whether any expert has LoRA."""
        kinds = frozenset((kind, len(ids) == 1) for kind, ids in self.groups(alone=False))
        return kinds, self._in_order, bool(self.lora)

    @property
    def _in_order(self) -> bool:
        return self.trained == self.held[len(self.held) - len(self.trained) :]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """`trained` and `frozen` (all others) -> number of experts; a storage's bytes may be proportional to either."""
        trained = len(self.trained)
        return {"trained": trained, "frozen": len(self.held) - trained}

    @cached_property
    def places(self) -> Hashable:
        """Key that is equal for banks that differ only in the ids of their experts."""
        trained, lora = (tuple(map(self.held.index, ids)) for ids in (self.trained, self.lora))
        return len(self.held), trained, lora, self.most

    def training(self, number: int) -> "Bank":
        """Return the bank with `number` trained experts, the last ones or the first ones, as here; all others have LoRA
        if any expert of this one has it."""
        ids = self.held[len(self.held) - number :] if self._in_order else self.held[:number]
        rest = tuple(expert for expert in self.held if expert not in ids)
        return replace(self, trained=ids, lora=rest if self.lora else ())

    def serves(self, other: "Bank") -> bool:
        """Return whether a record with this bank can be rewritten for the trained experts of `other` (experts.py)."""
        return self.branches == other.branches and (len(self.held), self.most) == (len(other.held), other.most)


def banks_of(run: ResolvedRun, ep: int = 0) -> dict[int, Bank]:
    """Return layer index -> the bank of each layer with experts, on the rank with the index `ep` on that axis."""
    placed, chosen, banks = run.placed_at(ep), run.selection, dict[int, Bank]()
    for layer in run.structure.moe_layers:
        held = placed.held(layer.index, layer.shape.num_experts)
        of_layer = (set(chosen.experts.get(layer.index, ())), set(chosen.lora_experts.get(layer.index, ())))
        trained, lora = (tuple(expert for expert in held if expert in ids) for ids in of_layer)
        banks[layer.index] = Bank(held, trained, lora, most_together(layer.shape, run.expert_memory, run.dtype))
    return banks


def probes_of(run: ResolvedRun, ep: int = 0) -> tuple[ResolvedRun, ResolvedRun] | None:
    """Return two runs with few trained experts, from whose records that of this run can be derived (experts.py), on the
    rank with the index `ep` on that axis.

    None if this run needs a record of its own: a single expert of a layer trains, layers or ranks train different
    numbers of experts, only some of the others have LoRA or its optimizer is 8-bit, experts are sharded, or no two
    numbers of experts suit.
    """
    banks = {layer: bank for layer, bank in banks_of(run, ep).items() if bank.trained}
    same = {_alike(bank) for bank in banks.values()}
    if len(same) != 1 or expert_shards(run.config.parallel) > 1:
        return None
    bank = next(iter(banks.values()))
    if len(bank.trained) < 2:
        return None  # the first group of experts that train is also the last
    if bank.lora and (len(bank.lora) != bank.sizes["frozen"] or run.optimizers["lora"].name.endswith("8bit")):
        return None  # 8-bit optimizers keep the states of small tensors in 32 bits
    numbers = (number for number in range(_FIRST, len(bank.held)) if bank.training(number).serves(bank))
    first = next(numbers, None)
    second = next((number for number in numbers if first and _tells(bank.training(first), bank.training(number))), None)
    if first is None or second is None:
        return None
    one, other = (_training(run, banks, bank, number) for number in (first, second))
    for probe, number in ((one, first), (other, second)):
        found = banks_of(probe, ep)
        if any(_alike(found[layer]) != _alike(bank.training(number)) for layer in banks):
            return None  # the trained experts are divided over the ranks in another way
    return one, other


def _alike(bank: Bank) -> Hashable:
    """Return a key that is equal for the banks of layers, and of ranks, whose memory is the same."""
    return bank.branches, *bank.sizes.values(), len(bank.lora), bank.most


def _tells(one: Bank, other: Bank) -> bool:
    """Return whether the records of two banks show which bytes grow with the size of a group: each kind of group must
    occur in several sizes in the two, or only with a single expert."""
    counts: dict[Kind, set[int]] = {}
    for kind, ids in (*one.groups(alone=False), *other.groups(alone=False)):
        counts.setdefault(kind, set()).add(len(ids))
    return all(len(sizes) > 1 or sizes == {1} for sizes in counts.values())


def _training(run: ResolvedRun, banks: dict[int, Bank], like: Bank, number: int) -> ResolvedRun:
    """Return the run with `number` trained experts on each rank, in each layer of `banks`: the first ones or the last
    ones of the layer, as `like.training` chooses."""
    parallel, layers = run.config.parallel, {layer.index: layer.shape.num_experts for layer in run.structure.moe_layers}
    count = number * (parallel.ep if run.placement else 1)
    is_last = like.training(number).trained == like.held[len(like.held) - number :]
    ids = {layer: range(layers[layer])[-count if is_last else 0 : None if is_last else count] for layer in banks}
    trained = {layer: tuple(those) for layer, those in ids.items()}
    rest = {layer: tuple(one for one in range(layers[layer]) if one not in those) for layer, those in ids.items()}
    selection = replace(
        run.selection,
        experts={**run.selection.experts, **trained},
        lora_experts={**run.selection.lora_experts, **(rest if like.lora else {})},
    )
    config = run.config.but(adapt={"experts": ExpertsConfig(ids=trained)})
    placement = run.placement and balance_experts(run.structure, selection, parallel.ep)
    parts = parts_by_name(run.structure, selection)
    return replace(run, config=config, selection=selection, placement=placement, parts=parts)
