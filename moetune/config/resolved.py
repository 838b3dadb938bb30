"""The run file with nothing left to choose: `run/resolve.py` makes it of a `RunConfig`."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from moetune.config.fields import ExpertIds
from moetune.config.schema import (
    AdaptConfig,
    ExpertsConfig,
    LoraConfig,
    ModelConfig,
    RunConfig,
    Section,
    Storage,
    TrainConfig,
)


class ResolvedModelConfig(ModelConfig):
    base: Storage
    dtype: Literal["bf16", "fp16", "fp32"]


class ResolvedLora(LoraConfig):
    ids: ExpertIds


class ResolvedAdapt(AdaptConfig):
    experts: ExpertsConfig | None
    lora: ResolvedLora | None


class ResolvedTrain(TrainConfig):
    router_aux_loss: float


class ResolvedConfig(RunConfig):
    """A run file on its model: no `auto`, and numbers of experts in the place of choices. It is a valid run file."""

    model: ResolvedModelConfig
    adapt: ResolvedAdapt
    train: ResolvedTrain


S = TypeVar("S", bound=Section)


def resolved(kind: type[S], section: Section, **values: Any) -> S:
    """Return a section as its resolved type, with the values that were open."""
    return kind.model_construct(section.model_fields_set | values.keys(), **{**dict(section), **values})
