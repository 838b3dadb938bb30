"""Runs that differ in how many layers are alike: one record serves them all.

A record lists the storages of a shortened model, in which groups of layers stand for others (trace/alike.py). Runs
with the same shortened model differ in nothing but which layers each group stands for.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from moetune.memory.closed_form.form import ClosedForm, Evaluated, kind_of
from moetune.memory.report import LoadPeaks, PartName
from moetune.memory.routing import BALANCED, Routing
from moetune.memory.trace.tracing import can_be_shortened
from moetune.models.catalog.gpus import Gpu
from moetune.parallel.coordinates import Coordinates
from moetune.run.resolve import ResolvedRun

_WHERE = ("targets", "layers", "ids")
"""Of `adapt.lora` what the layers' kinds tell."""
_STAYS: tuple[PartName, ...] = ("frozen_weights", "trainable_weights")


@dataclass
class Depths:
    """Closed forms that share what they have recorded."""

    _known: dict[Hashable, ClosedForm] = field(default_factory=dict)

    def at(self, run: ResolvedRun, rank: int = 0, gpu: Gpu | None = None, routing: Routing = BALANCED) -> Evaluated:
        """Evaluates a run.

        Raises:
            NoClosedForm: as `ClosedForm.at`.
        """
        form, config = ClosedForm(run, rank, gpu), run.config
        if config.model.weights != "pretrained" or not can_be_shortened(config):
            return form.at(config, routing)
        known = self._known.setdefault(_kind_of_shortened(form), form)
        found = known.at(config, routing)
        if form.short.units == known.short.units:
            return found
        form.recorded = known.recorded
        deeper = form.at(config, routing)
        more = {on_host: _resident(deeper, on_host) - _resident(found, on_host) for on_host in (False, True)}
        return replace(deeper, load=LoadPeaks(host=found.load.host + more[True], gpu=found.load.gpu + more[False]))


def _kind_of_shortened(form: ClosedForm) -> Hashable:
    """Everything that the step of the shortened model depends on, but sizes."""
    run, kind = form.run, kind_of(form.run)
    at = Coordinates.of(run.config.parallel, form.rank)
    starts = {unit.layers[0]: len(unit.layers) for unit in form.short.units}
    outside = {part.name for part in run.structure.parameters if part.layer is None}
    linears = {path for path, linear in run.structure.linears().items() if linear.layer is None}
    lora = kind.pop("adapt")["lora"]
    return (
        json.dumps([kind, {name: lora[name] for name in lora or () if name not in _WHERE}], default=str),
        form.gpu and form.gpu.capability,
        at,
        run.selection.full & outside,
        frozenset(linears.intersection(run.selection.lora_linears)),
        tuple((form.kinds[layer], starts.get(layer, 0)) for layer in form.short.kept),
    )


def _resident(found: Evaluated, on_host: bool) -> int:
    """Bytes of weights, which are there from loading on."""
    return found.bytes_of(lambda b: b.part in _STAYS and b.on_host == on_host and b.phase == "load")
