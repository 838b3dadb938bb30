"""`Predictor`: memory predictions for many runs of one model, which share the model and recorded closed forms.

A trace runs the training step on fake tensors and records every storage, in seconds. A closed form is a recorded step
whose bytes are formulas of the run's sizes, evaluated in milliseconds.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from moetune.config.schema import RunConfig
from moetune.memory.assumed_routing import UNKNOWN, AssumedRouting
from moetune.memory.closed_form.depth import Depths
from moetune.memory.closed_form.form import ClosedForm
from moetune.memory.commands.trl import predict_trl
from moetune.memory.predict import predict, quick
from moetune.memory.report import MemoryReport
from moetune.models.catalog.gpus import Gpu
from moetune.planning.kept import kept
from moetune.run.dtypes import DeviceType
from moetune.run.keeps import is_open
from moetune.run.resolve import ResolvedRun, resolve
from moetune.training.trl import InTrl

_MOST_ALONE = 300
"""Most trained experts in the layers that a trace runs, computed each alone, with which it takes less than a minute."""


@dataclass
class Predictor:
    """Predicts the memory of several runs of one model, faster than separate calls of `predict`.

    Attributes:
        gpu: the GPU to predict for: a name, a memory size such as `44GiB`, or a `Gpu`; None for the `hardware.gpu` of
            each run.
        routing: how many tokens each expert is assumed to receive.
        end: the single routing for which `of` predicts, in half the time of a whole report. `high`: the most uneven
            routing that is possible; of the report, `least_headroom` is right. `expected`: the assumed routing;
            `headroom_bytes` is right. None: all possible routings, a whole report.
        device_type: the device that the runs are resolved for, `cuda` or `cpu`.
        trainer: the trainer of TRL to predict for; None for moetune's own. TRL's have no closed form, so every run is
            traced, once on this machine.
    """

    gpu: str | Gpu | None = None
    routing: AssumedRouting = UNKNOWN
    end: Literal["high", "expected"] | None = None
    device_type: DeviceType = "cuda"
    trainer: InTrl | None = None
    _depths: Depths = field(default_factory=Depths)
    _like: ResolvedRun | None = None

    def resolve(self, config: RunConfig) -> ResolvedRun:
        """Resolve a run, reusing the model of the last call if it is the same; `UserError` if settings are wrong.

        `train.checkpointing: auto` counts as `full` and `train.keep_rows: auto` as `none`: they take memory only where
        some is left.
        """
        self._like = resolve(config, self.device_type, like=self._like)
        return self._like.keeping({}) if is_open(config.train) else self._like

    def of(self, config: RunConfig) -> MemoryReport:
        """Predict the memory of a run by closed form, or by a trace if it has none, for the routing that `end` says;
        `UserError` if the run cannot be resolved or predicted."""
        routing = self.routing
        if self.end is not None:
            only = routing.highest if self.end == "high" else None
            routing = only or replace(routing, lowest=None, highest=None)
        return self._quick(config, routing)

    def whole(self, config: RunConfig) -> MemoryReport:
        """Predict as `of` does, but a whole report whatever `end` says: for all routings that are possible."""
        return self._quick(config, self.routing)

    def takes_minutes(self, config: RunConfig) -> bool:
        """Return whether a trace of the run takes minutes: it computes very many experts, each alone because it is
        updated in the backward pass."""
        run = self.resolve(config)
        optimizer = run.optimizers.get("experts")
        if optimizer is None or not (optimizer.fused_backward or optimizer.offload):
            return False
        return sum(len(run.selection.experts.get(layer, ())) for layer in ClosedForm(run).stack.kept) > _MOST_ALONE

    def traced(self, config: RunConfig) -> MemoryReport:
        """Predict the memory of a run by a trace, or read its report from disk; a whole report, and errors as `of`."""
        return self._traced(self.resolve(config), self.routing)

    def _quick(self, config: RunConfig, routing: AssumedRouting) -> MemoryReport:
        run = self.resolve(config)
        if self.trainer is not None:
            return self._traced(run, routing)
        return quick(run, gpu=self.gpu, routing=routing, depths=self._depths)

    def _traced(self, run: ResolvedRun, routing: AssumedRouting) -> MemoryReport:
        gpu, trainer = self.gpu, self.trainer

        def traced() -> MemoryReport:
            if trainer is not None:
                return predict_trl(run, trainer.trainer, trainer.more, gpu=gpu, routing=routing)
            return predict(run, method="trace", gpu=gpu, routing=routing, depths=self._depths, advise=False)

        return kept(run, gpu, routing, traced, trainer)
