"""Runs that differ in how many layers are alike: one record serves them all.

A record lists the storages of a shortened model, in which groups of layers stand for others (trace/alike.py). Runs
with the same shortened model differ in nothing but how many layers each group stands for: how often its pieces happen,
and how many storages are born or die at once with those of all its layers. If these numbers tell the groups of a
recorded run apart, as the primes of sizes.py tell sizes apart, then the record of every other such run follows.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from moetune.catalog.gpus import Gpu
from moetune.memory.closed_form.form import ClosedForm, Evaluated, kind_of
from moetune.memory.closed_form.record import Record
from moetune.memory.report import LoadPeaks, PartName
from moetune.memory.routing import BALANCED, Routing
from moetune.memory.trace.alike import Unit, groups, kinds_of
from moetune.memory.trace.tracing import can_be_shortened
from moetune.parallel.coordinates import Coordinates
from moetune.run.resolve import ResolvedRun

_WHERE = ("targets", "layers", "ids")
"""Of `adapt.lora` what the layers' kinds tell."""
_STAYS: tuple[PartName, ...] = ("frozen_weights", "trainable_weights")


@dataclass
class Depths:
    """Closed forms that share what they have recorded."""

    _known: dict[Hashable, tuple[ClosedForm, Sequence[Unit]]] = field(default_factory=dict)

    def at(self, run: ResolvedRun, rank: int = 0, gpu: Gpu | None = None, routing: Routing = BALANCED) -> Evaluated:
        """Evaluates a run.

        Raises:
            NoClosedForm: as `ClosedForm.at`.
        """
        form, config = ClosedForm(run, rank, gpu), run.config
        if config.model.weights != "pretrained" or not can_be_shortened(config):
            return form.at(config, routing)
        key, units = _shortened(form)
        if key not in self._known:
            if _telling(units):
                self._known[key] = form, units
            return form.at(config, routing)
        known, known_units = self._known[key]
        found = known.at(config, routing)  # its sizes, and the record of their shape
        copies = tuple(unit.copies for unit in units)
        assert known.recorded is not None
        records = {shape: _of_depth(record, copies) for shape, record in known.recorded.records.items()}
        form.recorded = replace(known.recorded, records=records)
        if units == known_units:
            return found
        deeper = form.at(config, routing)
        more = {on_host: _resident(deeper, on_host) - _resident(found, on_host) for on_host in (False, True)}
        return replace(deeper, load=LoadPeaks(host=found.load.host + more[True], gpu=found.load.gpu + more[False]))


def _shortened(form: ClosedForm) -> tuple[Hashable, Sequence[Unit]]:
    """What the step of the shortened model depends on, and what its layers stand for."""
    run, kind = form.run, kind_of(form.run)
    at = Coordinates.of(run.config.parallel, form.rank)
    kinds = kinds_of(run, at.ep)
    kept, units = groups(kinds)
    starts = {unit.layers[0]: len(unit.layers) for unit in units}
    outside = {part.name for part in run.anatomy.parts if part.layer is None}
    linears = {path for path, linear in run.anatomy.linears().items() if linear.layer is None}
    lora = kind.pop("adapt")["lora"]
    key = (
        json.dumps([kind, {name: lora[name] for name in lora or () if name not in _WHERE}], default=str),
        form.gpu and form.gpu.capability,
        at,
        run.selection.full & outside,
        frozenset(linears.intersection(run.selection.lora_linears)),
        tuple((kinds[layer], starts.get(layer, 0)) for layer in kept),
    )
    return key, units


def _telling(units: Sequence[Unit]) -> bool:
    return len({len(unit.copies) for unit in units}) == len(units)


def _of_depth(record: Record, copies: tuple[tuple[tuple[int, ...], ...], ...]) -> Record:
    """A record whose numbers of layers tell, for others."""
    times = {len(old): len(new) for old, new in zip(record.copies, copies, strict=True)}

    def scaled(signs: np.ndarray) -> np.ndarray:
        return np.array([np.sign(sign) * times.get(abs(sign), abs(sign)) for sign in signs.tolist()], dtype=np.int64)

    pieces = tuple(replace(piece, signs=scaled(piece.signs)) for piece in record.pieces)
    return replace(record, pieces=pieces, copies=copies)


def _resident(found: Evaluated, on_host: bool) -> int:
    """Bytes of weights, which are there from loading on."""
    stays = [kind.part in _STAYS and kind.on_host == on_host and kind.phase == "load" for kind in found.record.named]
    return int((found.peak.alive * found.peak.values)[np.array(stays)[found.record.kinds]].sum())
