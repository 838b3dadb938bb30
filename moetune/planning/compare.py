"""Several runs on several cards, one row each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.memory.about import optimizers, trains
from moetune.memory.changes import Combination, fitting
from moetune.memory.report import MemoryReport
from moetune.models.parameter_count import count_parameters
from moetune.planning.predictor import Predictor


@dataclass(frozen=True)
class Compared:
    """One run on one card.

    Attributes:
        name: of the run file.
        left_out: bytes of frozen experts' weights that an estimate by active parameters does not see: of the experts
            that a token is not sent to.
        combination: where it does not fit, what would make it; None if it fits, or nothing is known.
    """

    name: str
    trains: str
    optimizer: str
    report: MemoryReport
    left_out: int
    combination: Combination | None

    def to_json(self) -> dict[str, Any]:
        report = self.report
        assert report.gpu is not None
        return {
            "name": self.name,
            "trains": self.trains,
            "gpu": {"name": report.gpu.name, "usable_bytes": report.gpu.usable_bytes},
            **report.figures(),
            "left_out_by_active_parameters": self.left_out,
            "combination": None if self.combination is None else list(self.combination.flags),
        }


def compare(runs: Sequence[tuple[str, RunConfig]], gpus: Sequence[str], method: str = "formula") -> list[Compared]:
    """Each run on each card.

    Args:
        runs: names and run files.
        gpus: names or sizes; none for `hardware.gpu` of each run.

    Raises:
        UserError: as `predict`; no card is named.
    """
    rows = []
    for gpu in gpus or (None,):
        needs = Predictor(gpu)
        for name, config in runs:
            if (gpu or config.hardware.gpu) is None:
                raise UserError(f"{name}: no card to compare with; give --gpu, or hardware.gpu in the run file")
            run = needs.resolve(config)
            report = needs.of(config) if method == "formula" else needs.traced(config)
            together = next(fitting(config, report, needs.of), None) if report.fits is False else None
            parameter_count = count_parameters(run.structure)
            idle = parameter_count.total - parameter_count.active_per_token
            left_out = report.fullest.parts.frozen_weights * idle // parameter_count.total
            rows.append(Compared(name, "; ".join(trains(run)), optimizers(run), report, left_out, together))
    return rows
