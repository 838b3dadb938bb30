"""`Depths`: reuses one recorded step for runs that differ only in how many layers are identical, in trained experts, or
in the rank of LoRA.

A record lists the storages of a shortened model, in which layers stand for identical ones (trace/alike.py).
Runs with the same shortened model, such as two that train the experts of the first 6 and of the first 12 layers, differ
only in the layers that each one stands for.
"""

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from moetune.cache import file_of, read_cached, write_cached
from moetune.memory.assumed_routing import BALANCED, AssumedRouting
from moetune.memory.closed_form.banks import Bank, banks_of, probes_of
from moetune.memory.closed_form.experts import Choices, Scale, Unlike
from moetune.memory.closed_form.form import ClosedForm
from moetune.memory.closed_form.lora_ranks import LoraRanks
from moetune.memory.closed_form.lora_ranks import probes_of as ranks_probed
from moetune.memory.closed_form.record import Record
from moetune.memory.closed_form.sizes import Shape
from moetune.memory.closed_form.store import Recorded
from moetune.memory.equal_ranks import divides_evenly
from moetune.memory.trace.tracing import can_be_shortened
from moetune.memory.trace.views import Trace
from moetune.models.catalog.gpus import Gpu
from moetune.run.resolve import ResolvedRun

_Banks = tuple[Bank | None, ...]
_Choices = Choices | None
_Grows = tuple[tuple[int, ...] | None]
_Scales = tuple[tuple[Scale, ...] | None]


@dataclass
class Depths:
    """In-memory cache of closed forms, in which runs with the same shortened model share one record. Records are also
    kept on disk (store.py)."""

    _known: dict[Path, ClosedForm] = field(default_factory=dict)
    _choices: dict[Hashable, _Choices] = field(default_factory=dict)
    _of_ranks: dict[Hashable, LoraRanks | None] = field(default_factory=dict)
    _rewritten: dict[Hashable, Recorded] = field(default_factory=dict)

    def at(self, run: ResolvedRun, rank: int = 0, gpu: Gpu | None = None, routing: AssumedRouting = BALANCED) -> Trace:
        """Evaluate the closed form of a run; record a step first if no run with the same shortened model has one.

        `gpu` is the GPU whose attention kernels and workspaces are assumed, None for a CPU; `routing` the assumed
        number of tokens that each expert receives. Returns and raises what `ClosedForm.at` does.
        """
        form = ClosedForm(run, rank, gpu)
        if can_be_shortened(run.config):
            form = self._with_records(form, routing)
        return form.at(run.config, routing)

    def _with_records(self, form: ClosedForm, routing: AssumedRouting) -> ClosedForm:
        """Return the closed form that evaluates the run of `form`: the cached one if its layers stand for the
        same others; else `form`, with the cached one's records or those derived from another rank of the run, other
        trained experts or another rank of LoRA."""
        form.recorded = (
            self._of_other_rank(form, routing) or self._of_experts(form, routing) or self._of_lora_rank(form, routing)
        )
        if form.recorded is None:
            known = self._like(form)
            if form.stack == known.stack:
                return known
            form.recorded = known.with_records(form.run.config, routing)
        return form

    def _like(self, form: ClosedForm) -> ClosedForm:
        """Return the cached closed form of the same shortened model; if there is none, cache and return `form`."""
        return self._known.setdefault(form.file, form)

    def _of_experts(self, form: ClosedForm, routing: AssumedRouting) -> Recorded | None:
        """Derive a run's record from those of two runs with few trained experts (banks.py, experts.py), which are
        recorded if need be; None if that is impossible."""
        probes = probes_of(form.run, form.ep)
        if probes is None:
            return None
        one, other = (ClosedForm(probe, form.rank, form.gpu) for probe in probes)
        if not form.stack == one.stack == other.stack:
            return None  # other layers of a probe are run
        one = self._like(one)
        records = one.with_records(probes[0].config, routing)
        shape = one.shape(probes[0].config, routing)
        form.recorded, other.recorded = Recorded(records.head), Recorded(records.head)
        shapes = (form.shape(form.run.config, routing), other.shape(probes[1].config, routing))
        if shapes != (shape, shape) or any(shape.idle):
            return None  # another code path, or another division of the loss
        its, *banks = (_banks(one) for one in (form, one, other))
        key = id(records), shape, its
        if key[:2] not in self._choices:
            self._choices[key[:2]] = _choices(one, other, shape, records.records[shape], banks)
        choices = self._choices[key[:2]]
        if choices is not None and key not in self._rewritten:
            self._rewritten[key] = Recorded(records.head, {shape: choices.at(its)})
        return self._rewritten.get(key)

    def _of_lora_rank(self, form: ClosedForm, routing: AssumedRouting) -> Recorded | None:
        """Derive a run's record from those of a higher and a lower rank of LoRA (lora_ranks.py), if the higher is
        recorded already; None if it is not, or that is impossible."""
        probes, lora = ranks_probed(form.run), form.run.config.adapt.lora
        if probes is None or lora is None:
            return None
        highest, lowest = (ClosedForm(probe, form.rank, form.gpu) for probe in probes)
        if not form.stack == highest.stack == lowest.stack:
            return None
        highest = self._like(highest)
        if not highest.knows(probes[0].config, routing):
            return None
        assert highest.recorded is not None
        records, shape = highest.recorded, highest.shape(probes[0].config, routing)
        form.recorded = Recorded(records.head)
        if form.shape(form.run.config, routing) != shape:
            return None  # another division of the loss
        key: tuple[Hashable, ...] = (id(records), shape)
        if key not in self._of_ranks:
            self._of_ranks[key] = _lora_ranks(highest, lowest, shape, records.records[shape])
        ranks, of_rank = self._of_ranks[key], (*key, lora.rank)
        if ranks is not None and of_rank not in self._rewritten:
            assert isinstance(lora.rank, int)
            with suppress(Unlike):
                self._rewritten[of_rank] = Recorded(records.head, {shape: ranks.at(lora.rank)})
        return self._rewritten.get(of_rank)

    def _of_other_rank(self, form: ClosedForm, routing: AssumedRouting) -> Recorded | None:
        """Derive the record of a rank from that of the first rank on its `ep` axis, if both differ only in the ids of
        their experts; None if they differ more, or this is the first."""
        parallel, config = form.run.config.parallel, form.run.config
        if not form.ep or parallel.tp > 1 or not divides_evenly(form.run):
            return None
        first = ClosedForm(form.run, form.rank - form.ep, form.gpu)
        banks, others = _banks(first), _banks(form)
        if form.stack != first.stack or any(
            (one and one.places) != (other and other.places) for one, other in zip(banks, others, strict=True)
        ):
            return None
        first = self._with_records(first, routing)
        records, shape = first.with_records(config, routing), first.shape(config, routing)
        if any(shape.idle):
            return None
        key = id(records), shape, others
        if key not in self._rewritten:
            ids = [
                {} if one is None or other is None else dict(zip(one.held, other.held, strict=True))
                for one, other in zip(banks, others, strict=True)
            ]
            record = records.records[shape].on_rank(first.ep, form.ep, ids)
            self._rewritten[key] = Recorded(records.head, {shape: record})
        return self._rewritten[key]


def _choices(one: ClosedForm, other: ClosedForm, shape: Shape, first: Record, banks: Sequence[_Banks]) -> _Choices:
    """Find what grows with the number of trained experts by comparing `first`, the record of `one`, with a step of
    `other`; return both, or None if records of other numbers cannot be derived from `first`. Kept on disk.

    `shape` is that of the batches of both steps; `banks` are those of the recorded layers, of `one` and of `other`.
    """
    file = file_of({"scales": [one.file.name, other.file.name, repr(shape)], "rank": one.rank})
    known = read_cached(file, _Scales)
    if known is not None and len(known[0] or first.log.blocks) == len(first.log.blocks):
        return None if known[0] is None else Choices(first, banks[0], known[0])
    try:
        found = Choices.of(first, banks[0], other.like(first, shape), banks[1])
    except Unlike:
        found = None
    write_cached(file, _Scales, (None if found is None else found.scales,))
    return found


def _lora_ranks(highest: ClosedForm, lowest: ClosedForm, shape: Shape, record: Record) -> LoraRanks | None:
    """Find what grows with the rank of LoRA by comparing `record`, that of `highest`, with a step of `lowest`; None if
    records of other ranks cannot be derived. Kept on disk. `shape` is that of the batches of both steps."""
    file = file_of({"ranks": [highest.file.name, lowest.file.name, repr(shape)], "rank": highest.rank})
    known = read_cached(file, _Grows)
    if known is not None and len(known[0] or record.log.blocks) == len(record.log.blocks):
        return None if known[0] is None else LoraRanks(record, known[0])
    try:
        found = LoraRanks.of(record, lowest.like(record, shape))
    except Unlike:
        found = None
    write_cached(file, _Grows, (None if found is None else found.grows,))
    return found


def _banks(form: ClosedForm) -> _Banks:
    """Return the bank on the form's rank of each decoder layer that is recorded; None for a layer without experts."""
    banks = banks_of(form.run, form.ep)
    return tuple(banks.get(layer) for layer in form.stack.kept)
