"""The parameter counter: of a model, or of a run with what would train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moetune.adapt.build import Adapted, build
from moetune.models.parameter_count import ParameterCount, count_parameters
from moetune.models.source import find_model_source
from moetune.models.structure import meta_model, read_structure
from moetune.run.resolve import AnyRun, resolve


@dataclass(frozen=True)
class Count:
    """Parameters of a model. `trainable` are those that a run would train: `total`, and by part; None without a run."""

    model: str
    parameter_count: ParameterCount
    trainable: dict[str, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """The object that `moetune count --json` prints."""
        return self.parameter_count.to_json() | ({} if self.trainable is None else {"trainable": self.trainable})


def count(of: AnyRun) -> Count:
    """Count the parameters of a run's model and of what would train, or of a model; reads no weights.

    Args:
        of: a run, a run file (`.yaml`), or a model, as under `model.path`.

    Raises:
        UserError: no such model, or one that would be miscounted; or as `resolve`.
    """
    if not isinstance(of, str) or of.endswith((".yaml", ".yml")):
        run = resolve(of)
        return Count(run.config.model.path, count_parameters(run.structure), count_trainable(build(run, "meta")))
    return Count(of, count_parameters(read_structure(meta_model(find_model_source(of).config))))


def count_trainable(adapted: Adapted) -> dict[str, int]:
    """Parameters that train: `total`, and by part `router`, `experts`, `lora`, `other`."""
    counts = {"total": 0, "router": 0, "experts": 0, "lora": 0, "other": 0}
    for name, parameter in adapted.trainable().items():
        counts[adapted.part_of(name)] += parameter.numel()
        counts["total"] += parameter.numel()
    return counts
