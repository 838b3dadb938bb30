"""`Depths`: reuses one recorded step for runs that differ only in which layers are identical, or in trained experts.

A record lists the storages of a shortened model, in which groups of layers stand for identical ones (trace/alike.py).
Runs with the same shortened model, such as two that train the experts of the first 6 and of the first 12 layers, differ
only in the layers that each group stands for.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from moetune.memory.assumed_routing import BALANCED, AssumedRouting
from moetune.memory.closed_form.banks import Bank, banks_of, probes_of
from moetune.memory.closed_form.experts import Choices, Unlike
from moetune.memory.closed_form.form import ClosedForm
from moetune.memory.closed_form.store import Recorded
from moetune.memory.trace.tracing import can_be_shortened
from moetune.memory.trace.views import Trace
from moetune.models.catalog.gpus import Gpu
from moetune.run.resolve import ResolvedRun


@dataclass
class Depths:
    """In-memory cache of closed forms, in which runs with the same shortened model share one record. Records are also
    kept on disk (store.py)."""

    _known: dict[str, ClosedForm] = field(default_factory=dict)
    _choices: dict[Hashable, Choices | None] = field(default_factory=dict)
    _rewritten: dict[Hashable, Recorded] = field(default_factory=dict)

    def at(self, run: ResolvedRun, rank: int = 0, gpu: Gpu | None = None, routing: AssumedRouting = BALANCED) -> Trace:
        """Evaluate the closed form of a run; record a step first if no run with the same shortened model has one.

        `gpu` is the GPU whose attention kernels and workspaces are assumed, None for a CPU; `routing` the assumed
        number of tokens that each expert receives. Returns and raises what `ClosedForm.at` does.
        """
        form = ClosedForm(run, rank, gpu)
        if can_be_shortened(run.config):
            form.recorded = self._of_experts(form, routing)
            if form.recorded is None:
                known = self._like(form)
                if form.short.units == known.short.units:
                    return known.at(run.config, routing)
                form.recorded = known.with_records(run.config, routing)
        return form.at(run.config, routing)

    def _like(self, form: ClosedForm) -> ClosedForm:
        """Return the cached closed form of the same shortened model; if there is none, cache and return `form`."""
        return self._known.setdefault(form.key, form)

    def _of_experts(self, form: ClosedForm, routing: AssumedRouting) -> Recorded | None:
        """Derive a run's record from those of two runs with few trained experts (experts.py); None if impossible."""
        probes = probes_of(form.run)
        if probes is None:
            return None
        one, other = (ClosedForm(probe, form.rank, form.gpu) for probe in probes)
        if not form.short.units == one.short.units == other.short.units:
            return None  # the layers of a probe form other groups
        one, other = self._like(one), self._like(other)
        records = one.with_records(probes[0].config, routing)
        shape = one.shape(probes[0].config, routing)
        form.recorded = Recorded(records.head)
        banks = [_banks(run, form.short.kept) for run in (form.run, *probes)]
        key = id(records), shape, banks[0]
        if shape != form.shape(form.run.config, routing) or any(shape.idle):
            return None
        if key[:2] not in self._choices:
            others = other.with_records(probes[1].config, routing, records.head)
            try:
                self._choices[key[:2]] = Choices.of(records.records[shape], banks[1], others.records[shape], banks[2])
            except (Unlike, KeyError):  # the second step takes another code path, or divides the loss differently
                self._choices[key[:2]] = None
        choices = self._choices[key[:2]]
        if choices is not None and key not in self._rewritten:
            self._rewritten[key] = Recorded(records.head, {shape: choices.at(banks[0])})
        return self._rewritten.get(key)


def _banks(run: ResolvedRun, layers: Sequence[int]) -> tuple[Bank | None, ...]:
    """Return the bank of each of these decoder layers; None for a layer without experts."""
    banks = banks_of(run)
    return tuple(banks.get(layer) for layer in layers)
