"""`Predictor`: memory predictions for many runs of one model, which share the model; reports are kept on disk."""

from dataclasses import dataclass, replace
from typing import Literal

from moetune.config.schema import RunConfig
from moetune.memory.assumed_routing import UNKNOWN, AssumedRouting
from moetune.memory.commands.trl import predict_trl
from moetune.memory.predict import predict
from moetune.memory.report import MemoryReport
from moetune.models.catalog.gpus import Gpu
from moetune.planning.kept import kept
from moetune.run.dtypes import DeviceType
from moetune.run.keeps import is_open
from moetune.run.resolve import ResolvedRun, resolve
from moetune.training.trl import InTrl


@dataclass
class Predictor:
    """Predicts the memory of several runs of one model, each by a trace, which takes about a second.

    Attributes:
        gpu: the GPU to predict for: a name, a memory size such as `44GiB`, or a `Gpu`; None for the `hardware.gpu` of
            each run.
        routing: how many tokens each expert is assumed to receive.
        end: the single routing for which `of` predicts, in half the time of several. `high`: the most uneven routing
            that is possible; of the report, `least_headroom` is right. `expected`: the assumed routing;
            `headroom_bytes` is right. None: all possible routings.
        device_type: the device that the runs are resolved for, `cuda` or `cpu`.
        trainer: the trainer of TRL to predict for; None for moetune's own.
    """

    gpu: str | Gpu | None = None
    routing: AssumedRouting = UNKNOWN
    end: Literal["high", "expected"] | None = None
    device_type: DeviceType = "cuda"
    trainer: InTrl | None = None
    _like: ResolvedRun | None = None

    def resolve(self, config: RunConfig) -> ResolvedRun:
        """Resolve a run, reusing the model of the last call if it is the same; `UserError` if settings are wrong.

        `train.checkpointing: auto` counts as `full` and `train.keep_rows: auto` as `none`: they take memory only where
        some is left.
        """
        self._like = resolve(config, self.device_type, like=self._like)
        return self._like.keeping({}) if is_open(config.train) else self._like

    def of(self, config: RunConfig) -> MemoryReport:
        """Predict the memory of a run for the routing that `end` says, without simulating the allocator; `UserError` if
        it cannot be resolved or predicted."""
        return self.of_resolved(self.resolve(config))

    def of_resolved(self, run: ResolvedRun) -> MemoryReport:
        """Predict as `of` does, a run that is resolved already."""
        routing = self.routing
        if self.end is not None:
            only = routing.highest if self.end == "high" else None
            routing = only or replace(routing, lowest=None, highest=None)
        return self._kept(run, routing, simulated=False)

    def whole(self, config: RunConfig) -> MemoryReport:
        """Predict a whole report, whatever `end` says: for all routings that are possible, the allocator simulated."""
        return self._kept(self.resolve(config), self.routing, simulated=True)

    def _kept(self, run: ResolvedRun, routing: AssumedRouting, *, simulated: bool) -> MemoryReport:
        gpu, trainer = self.gpu, self.trainer

        def traced() -> MemoryReport:
            if trainer is not None:
                return predict_trl(run, trainer.trainer, trainer.more, gpu=gpu, routing=routing)
            return predict(run, gpu=gpu, routing=routing, simulated=simulated)

        return kept(run, gpu, routing, traced, trainer, simulated=simulated)
