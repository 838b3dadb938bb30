"""Predictions of several runs of one model: by closed form where there is one, by trace before one is recommended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
    """Predicts runs of one model, which share the model and the recorded closed forms.

    Attributes:
        gpu: name or size of the card, or the card; None for `hardware.gpu` of each run.
        device_type: the device that the runs are resolved for.
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
        """Predict by closed form, or by trace if the run has none.

        Raises:
            UserError: as `predict`.
        """
        run = self.resolve(config)
        common: dict[str, Any] = {"gpu": self.gpu, "routing": self.routing, "advise": False}
        try:
            return predict(run, method="formula", depths=self._depths, **common)
        except NoClosedForm:
            return predict(run, method="trace", **common)

    def traced(self, config: RunConfig) -> MemoryReport:
        return predict(self.resolve(config), method="trace", gpu=self.gpu, routing=self.routing, advise=False)
