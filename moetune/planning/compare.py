"""`moetune compare`: predicted memory of several runs on several GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.memory.report import MemoryReport
from moetune.models.parameter_count import count_parameters
from moetune.planning.predictor import Predictor
from moetune.planning.savings import Remedy, fitting


@dataclass(frozen=True)
class Compared:
    """The prediction of one run on one GPU.

    Attributes:
        name: the name of the run, which `compare` was given.
        report: the predicted memory.
        left_out: bytes of frozen weights that an estimate by active parameters would leave out: frozen weights ×
            (1 - active / all parameters).
        remedy: changes of the run file with which the run would fit; None if it fits, or if none are known.
    """

    name: str
    report: MemoryReport
    left_out: int
    remedy: Remedy | None

    def to_json(self) -> dict[str, Any]:
        report, about = self.report, dict(self.report.about)
        assert report.gpu is not None
        return {
            "name": self.name,
            "trains": about["trains"],
            "gpu": {"name": report.gpu.name, "usable_bytes": report.gpu.usable_bytes},
            **report.figures(),
            "left_out_by_active_parameters": self.left_out,
            "combination": None if self.remedy is None else list(self.remedy.flags),
        }


def compare(runs: Sequence[tuple[str, RunConfig]], gpus: Sequence[str]) -> list[Compared]:
    """Predict the memory of each run on each GPU; all runs on the first GPU come first.

    Args:
        runs: (name, configuration) pairs.
        gpus: names such as `l40s`, or memory sizes such as `44GiB`; if empty, each run's own `hardware.gpu`.

    Raises:
        UserError: a run has no GPU to be compared on, or cannot be resolved or predicted.
    """
    rows = []
    for gpu in gpus or (None,):
        predictor = Predictor(gpu)
        for name, config in runs:
            if not (gpu or config.hardware.names):
                raise UserError(f"{name}: no card to compare with; give --gpu, or hardware.gpu in the run file")
            report = predictor.report(config)
            remedy = next(fitting(config, report, predictor.quick), None) if report.fits is False else None
            count = count_parameters(predictor.resolve(config).structure)
            idle = count.total - count.active_per_token
            rows.append(Compared(name, report, report.fullest.parts.frozen_weights * idle // count.total, remedy))
    return rows
