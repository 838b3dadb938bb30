"""`Depths`: reuses one recorded step for runs that differ only in which decoder layers are identical.

A record lists the storages of a shortened model, in which groups of layers stand for identical ones (trace/alike.py).
Runs with the same shortened model, such as two that train the experts of the first 6 and of the first 12 layers, differ
only in the layers that each group stands for.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import dataclass, field

from moetune.memory.assumed_routing import BALANCED, AssumedRouting
from moetune.memory.closed_form.form import ClosedForm, kind_of
from moetune.memory.trace.tracing import can_be_shortened
from moetune.memory.trace.views import Trace
from moetune.models.catalog.gpus import Gpu
from moetune.parallel.coordinates import Coordinates
from moetune.run.resolve import ResolvedRun

_WHERE = ("targets", "layers", "ids")
"""Keys of `adapt.lora` that say where LoRA is; the layers' kinds contain that already."""


@dataclass
class Depths:
    """Cache in memory of closed forms, which are runs' memory as formulas of their sizes; one record serves all runs
    with the same shortened model. The records are also kept on disk (store.py)."""

    _known: dict[Hashable, ClosedForm] = field(default_factory=dict)

    def at(self, run: ResolvedRun, rank: int = 0, gpu: Gpu | None = None, routing: AssumedRouting = BALANCED) -> Trace:
        """Evaluate the closed form of a run; record a step first if no run with the same shortened model has one.

        `gpu` is the GPU whose attention kernels and workspaces are assumed, None for a CPU; `routing` the assumed
        number of tokens that each expert receives. Returns and raises what `ClosedForm.at` does.
        """
        form = ClosedForm(run, rank, gpu)
        if can_be_shortened(run.config):
            known = self._known.setdefault(_kind_of_shortened(form), form)
            if form.short.units == known.short.units:
                return known.at(run.config, routing)
            if known.recorded is None:
                known.at(run.config, routing)
            form.recorded = known.recorded
        return form.at(run.config, routing)


def _kind_of_shortened(form: ClosedForm) -> Hashable:
    """Return a key that is equal for closed forms whose shortened models have the same step apart from sizes."""
    run, kind = form.run, kind_of(form.run)
    at = Coordinates.of(run.config.parallel, form.rank)
    starts = {unit.layers[0]: len(unit.layers) for unit in form.short.units}
    outside = {part.name for part in run.structure.parameters if part.layer is None}
    linears = {path for path, linear in run.structure.linears().items() if linear.layer is None}
    lora = kind.pop("adapt")["lora"]
    del kind["train"]["keeps_rows"]  # the layers' kinds say it
    return (
        json.dumps([kind, {name: lora[name] for name in lora or () if name not in _WHERE}], default=str),
        form.gpu and form.gpu.capability,
        at,
        run.selection.full & outside,
        frozenset(linears.intersection(run.selection.lora_linears)),
        tuple((form.kinds[layer], starts.get(layer, 0)) for layer in form.short.kept),
    )
