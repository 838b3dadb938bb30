"""The parameter counter: of a model, or of a run with what would train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moetune.adapt.build import Adapted, build
from moetune.models.parameter_count import ParameterCount, count_parameters
from moetune.models.source import find_model_source
from moetune.models.structure import meta_model, read_structure
from moetune.run.resolve import ResolvedRun


@dataclass(frozen=True)
class Count:
    """Parameters of a model. `trainable` are those that a run would train: `total`, and by part; None without a run."""

    model: str
    parameter_count: ParameterCount
    trainable: dict[str, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """The object that `moetune count --json` prints."""
        return self.parameter_count.to_json() | ({} if self.trainable is None else {"trainable": self.trainable})


def count(of: ResolvedRun | str) -> Count:
    """Counts the parameters of a run's model and what would train, or of a model by `model.path`; reads no weights.

    Raises:
        UserError: no such model, or one that would be miscounted.
    """
    if isinstance(of, ResolvedRun):
        return Count(of.config.model.path, count_parameters(of.structure), count_trainable(build(of, "meta")))
    return Count(of, count_parameters(read_structure(meta_model(find_model_source(of).config))))


def count_trainable(adapted: Adapted) -> dict[str, int]:
    """Parameters that train: `total`, and by part `router`, `experts`, `lora`, `other`."""
    counts = {"total": 0, "router": 0, "experts": 0, "lora": 0, "other": 0}
    for name, parameter in adapted.trainable().items():
        counts[adapted.part_of(name)] += parameter.numel()
        counts["total"] += parameter.numel()
    return counts
