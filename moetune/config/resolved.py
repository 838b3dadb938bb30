"""`ResolvedConfig`: a run file with model-dependent values filled in; without torch.

`run/resolve.py` makes it from a `RunConfig`; the run file together with its model is `ResolvedRun` (run/resolved.py).
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Tag

from moetune.config.fields import ExpertIds
from moetune.config.schema import (
    AdaptConfig,
    BaseConfig,
    ExpertsConfig,
    LoraConfig,
    ModelConfig,
    RunConfig,
    Storage,
    TrainConfig,
    storage_in,
)
from moetune.config.schema.section import WORD_OR_SECTION, Section


class ResolvedBaseConfig(BaseConfig):
    """The section `model.base` without `auto`."""

    default: Storage


ResolvedBase = Annotated[
    Annotated[Storage, Tag("word")] | Annotated[ResolvedBaseConfig, Tag("by layer")], WORD_OR_SECTION
]


class ResolvedModelConfig(ModelConfig):
    """The `model:` section without `auto`."""

    base: ResolvedBase
    dtype: Literal["bf16", "fp16", "fp32"]
    attention: Literal["sdpa", "eager", "flash_attention_2"]

    def storage_of(self, part: str, layer: int | None) -> Storage:
        """Return in what the frozen matrices of a part of a layer are stored, as `storage_in`."""
        return storage_in(self.base, part, layer)


class ResolvedLora(LoraConfig):
    """The `adapt.lora` section with expert ids in place of a choice by scores."""

    ids: ExpertIds


class ResolvedAdapt(AdaptConfig):
    """The `adapt:` section with expert ids in place of choices by scores."""

    experts: ExpertsConfig | None
    lora: ResolvedLora | None


class ResolvedTrain(TrainConfig):
    """The `train:` section with a number in place of `router_aux_loss: auto`."""

    router_aux_loss: float


class ResolvedConfig(RunConfig):
    """A run file with values in place of `auto` in `model:` and `router_aux_loss`, and expert ids in place of choices.

    It is a valid run file itself. Other keys may still be `auto`: `data.format`, `train.expert_memory`,
    `train.loss_memory`, and `train.checkpointing`, `train.keep_rows` and `train.layer_by_layer` until the GPU is known.
    """

    model: ResolvedModelConfig
    adapt: ResolvedAdapt
    train: ResolvedTrain


S = TypeVar("S", bound=Section)


def resolved(kind: type[S], section: Section, **values: Any) -> S:
    """Return `section` as its resolved type `kind`, such as `ResolvedTrain`, with the keys in `values` replaced.

    Nothing is validated.
    """
    return kind.model_construct(section.model_fields_set | values.keys(), **{**dict(section), **values})
