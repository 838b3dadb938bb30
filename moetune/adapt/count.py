"""`moetune count`: a model's parameters, and those that a run trains, without reading weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetune.adapt.build import Adapted, build
from moetune.config.schema import ModelConfig
from moetune.errors import raise_problems
from moetune.models.dry_run import dry_run
from moetune.models.parameter_count import ParameterCount, count_parameters
from moetune.models.source import find_model_source
from moetune.models.structure import meta_model, read_structure
from moetune.run import validation
from moetune.run.resolve import AnyRun, resolve


@dataclass(frozen=True)
class Count:
    """Numbers of parameters of a model, and of those that a run would train.

    `trainable` is what `count_trainable` returns; None if a model was counted and not a run.
    """

    model: str
    parameter_count: ParameterCount
    trainable: dict[str, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the object that `moetune count --json` prints."""
        return self.parameter_count.to_json() | ({} if self.trainable is None else {"trainable": self.trainable})


def count(of: AnyRun) -> Count:
    """Count the parameters of a model and, if a run is given, those that the run would train. Read no weights.

    Args:
        of: a run file (a path ending in `.yaml` or `.yml`), a run as an object, or any other path or string
            as the folder or name of a model, as in `model.path`.

    Raises:
        UserError: the model is not found, or quantized in a format that is not read; its parameters cannot be counted
            correctly; or the run cannot be resolved.
    """
    of = str(of) if isinstance(of, Path) else of
    if not isinstance(of, str) or of.endswith((".yaml", ".yml")):
        run = resolve(of)
        return Count(run.config.model.path, count_parameters(run.structure), count_trainable(build(run, "meta")))
    source = find_model_source(of)
    raise_problems(validation.unreadable_source(source.quantization, ModelConfig.named(of)))
    model = meta_model(source.config)
    structure = read_structure(model)
    dry_run(model)
    return Count(of, count_parameters(structure))


def count_trainable(adapted: Adapted) -> dict[str, int]:
    """Return the number of trained parameters: `total`, and by part `router`, `experts`, `lora`, `other`."""
    counts = {"total": 0, "router": 0, "experts": 0, "lora": 0, "other": 0}
    for name, parameter in adapted.trainable().items():
        counts[adapted.part_of(name)] += parameter.numel()
        counts["total"] += parameter.numel()
    return counts
