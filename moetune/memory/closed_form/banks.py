"""Which experts of each layer train, and the probe runs from whose records those of other numbers are derived."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property

from moetune.config.schema import ExpertsConfig
from moetune.experts.bank import Kind, groups_of, most_together
from moetune.run.names import parts_by_name
from moetune.run.resolve import ResolvedRun

_FIRST = 3
"""Fewest trained experts of a probe run: its first is kept, its second repeated for all others, its last left out."""


@dataclass(frozen=True)
class Bank:
    """Which experts of one layer train, and how.

    Attributes:
        experts: number of experts.
        trained: ids of those that train in full.
        lora: ids of those with LoRA.
        most: largest number of experts that are computed together.
    """

    experts: int
    trained: tuple[int, ...]
    lora: tuple[int, ...]
    most: int

    def groups(self, *, alone: bool) -> list[tuple[Kind, tuple[int, ...]]]:
        """Return (kind, expert ids) of each group that is computed together; `alone` as in `bank.groups_of`."""
        frozen = [expert for expert in range(self.experts) if expert not in self.trained]
        order = [*frozen, *self.trained]
        kinds: list[Kind] = ["lora" if expert in self.lora else "frozen" for expert in frozen]
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
        return self.trained == tuple(range(self.experts - len(self.trained), self.experts))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Numbers of trained and of other experts by name; a storage's bytes may be proportional to either."""
        trained = len(self.trained)
        return {"trained": trained, "frozen": self.experts - trained}

    def training(self, number: int) -> Bank:
        """Return the bank with `number` trained experts; all others have LoRA if any expert of this one has it."""
        ids = range(self.experts - number, self.experts) if self._in_order else range(number)
        rest = tuple(expert for expert in range(self.experts) if expert not in ids)
        return replace(self, trained=tuple(ids), lora=rest if self.lora else ())

    def serves(self, other: Bank) -> bool:
        """Return whether a record with this bank can be rewritten for the trained experts of `other` (experts.py)."""
        return self.branches == other.branches and (self.experts, self.most) == (other.experts, other.most)


def banks_of(run: ResolvedRun) -> dict[int, Bank]:
    """Return layer index -> the bank of each layer with experts; all experts must be on one rank."""
    chosen = run.selection
    return {
        layer.index: Bank(
            layer.shape.num_experts,
            chosen.experts.get(layer.index, ()),
            chosen.lora_experts.get(layer.index, ()),
            most_together(layer.shape, run.expert_memory, run.dtype),
        )
        for layer in run.structure.moe_layers
    }


def probes_of(run: ResolvedRun) -> tuple[ResolvedRun, ResolvedRun] | None:
    """Return two runs with few trained experts, from whose records that of this run can be derived (experts.py).

    None if this run needs a record of its own: layers train different numbers of experts, only some of the others have
    LoRA or its optimizer is 8-bit, there are several ranks, experts are on the host, or no two numbers of experts suit.
    """
    banks = {layer: bank for layer, bank in banks_of(run).items() if bank.trained}
    same = {(bank.branches, *bank.sizes.values(), len(bank.lora), bank.most) for bank in banks.values()}
    if len(same) != 1 or run.config.parallel.ranks > 1 or run.config.model.experts_on == "host":
        return None
    bank = next(iter(banks.values()))
    if bank.lora and (len(bank.lora) != bank.sizes["frozen"] or run.optimizers["lora"].name.endswith("8bit")):
        return None  # 8-bit optimizers keep the states of small tensors in 32 bits
    numbers = [n for n in range(_FIRST, bank.experts) if bank.training(n).serves(bank)]
    first = numbers[0] if numbers else 0
    second = next((n for n in numbers[1:] if _tells(bank.training(first), bank.training(n))), None)
    if second is None:
        return None
    return _training(run, banks, first), _training(run, banks, second)


def _tells(one: Bank, other: Bank) -> bool:
    """Return whether each kind of group occurs in two sizes, or only as a single expert, in the two banks. Only then do
    their records show which bytes grow with a group's size."""
    counts: dict[Kind, set[int]] = {}
    for kind, ids in (*one.groups(alone=False), *other.groups(alone=False)):
        counts.setdefault(kind, set()).add(len(ids))
    return all(len(sizes) > 1 or sizes == {1} for sizes in counts.values())


def _training(run: ResolvedRun, banks: dict[int, Bank], number: int) -> ResolvedRun:
    """Return the run with `number` trained experts in each layer of `banks`."""
    new = {layer: bank.training(number) for layer, bank in banks.items()}
    selection = replace(
        run.selection,
        experts={**run.selection.experts, **{layer: bank.trained for layer, bank in new.items()}},
        lora_experts={**run.selection.lora_experts, **{layer: bank.lora for layer, bank in new.items() if bank.lora}},
    )
    chosen = ExpertsConfig(ids={layer: bank.trained for layer, bank in new.items()})
    config = run.config.but(adapt={"experts": chosen})
    return replace(run, config=config, selection=selection, parts=parts_by_name(run.structure, selection))
