"""What runs need, one after the other: by closed form where there is one, and traced before anything is recommended."""

from __future__ import annotations

from dataclasses import dataclass, field

from moetune.config.schema import RunConfig
from moetune.memory.closed_form.depth import Depths
from moetune.memory.closed_form.record import NoClosedForm
from moetune.memory.predict import predict
from moetune.memory.report import MemoryReport
from moetune.memory.routing import BALANCED, Routing
from moetune.models.catalog.gpus import Gpu
from moetune.run.dtypes import DeviceType
from moetune.run.resolve import ResolvedRun, resolve


@dataclass
class Predictor:
    """Predictions of runs of one model, which share the model and what closed forms have recorded.

    Attributes:
        gpu: the card, its name or its size; None for `hardware.gpu` of each run.
        device_type: what the runs are for.
    """

    gpu: str | Gpu | None = None
    routing: Routing = BALANCED
    device_type: DeviceType = "cuda"
    _depths: Depths = field(default_factory=Depths)
    _like: ResolvedRun | None = None

    def resolve(self, config: RunConfig) -> ResolvedRun:
        self._like = resolve(config, self.device_type, like=self._like)
        return self._like

    def of(self, config: RunConfig) -> MemoryReport:
        """By closed form, or traced if there is none.

        Raises:
            UserError: as `predict`.
        """
        run = self.resolve(config)
        how = {"gpu": self.gpu, "routing": self.routing, "advise": False}
        try:
            return predict(run, method="formula", depths=self._depths, **how)  # type: ignore[arg-type]
        except NoClosedForm:
            return predict(run, method="trace", **how)  # type: ignore[arg-type]

    def traced(self, config: RunConfig) -> MemoryReport:
        return predict(self.resolve(config), method="trace", gpu=self.gpu, routing=self.routing, advise=False)
