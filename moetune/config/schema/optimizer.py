"""`optimizer:` of a run file: one, or one for each part that trains."""

import typing
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from moetune.config.fields import Decay, Strength
from moetune.config.schema.section import Section

OptimizerName = Literal[
    "adamw", "adamw8bit", "paged_adamw", "paged_adamw8bit", "lion8bit", "ademamix8bit", "adafactor", "sgd", "lomo",
    "adalomo",
]  # fmt: skip
Part = Literal["router", "experts", "lora", "other"]
PARTS: tuple[Part, ...] = typing.get_args(Part)
"""Groups of trained parameters: routers, experts that train in full, LoRA factors, and all others.

Each part may have its own optimizer.
"""
_FUSED = ("lomo", "adalomo")  # optimizers that default to fused_backward, as in their papers
_OF_SOME = ("betas", "eps", "momentum")  # settings that only some optimizers have; None for the others
_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}
_OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": _ADAM,
    "adamw8bit": _ADAM,
    "paged_adamw": _ADAM,
    "paged_adamw8bit": _ADAM,
    "ademamix8bit": {"betas": (0.9, 0.999, 0.9999), "eps": 1e-8},
    "lion8bit": {"betas": (0.9, 0.99)},
    "sgd": {"momentum": 0.0},
}
"""Optimizer -> the settings that only some optimizers have, with their defaults."""


class OptimizerConfig(Section):
    """One optimizer and its settings.

    Attributes:
        lr: learning rate, before the schedule.
        betas: decay rates of the moments; None for optimizers without them.
        eps: term added to the denominator; None for optimizers without it.
        momentum: momentum of `sgd`; None for all others.
        master_weights: how 16-bit weights are updated: `none` in their own precision, `fp32` through a float32 copy
            that is kept between steps, `stochastic` in float32, and then rounded stochastically.
        fused_backward: update each parameter during the backward pass, as soon as its gradient is complete, and free
            the gradient.
        offload: keep optimizer states and float32 weights in host memory and update there.
    """

    name: OptimizerName = "adamw8bit"
    lr: Annotated[float, Field(gt=0, le=1e38)] = 1e-4
    weight_decay: Strength = 0.0
    betas: tuple[Decay, ...] | None = None
    eps: Annotated[float, Field(gt=0, le=1)] | None = None
    momentum: Decay | None = None
    master_weights: Literal["none", "fp32", "stochastic"] = "none"
    fused_backward: bool = False
    offload: bool = False

    @model_validator(mode="before")
    @classmethod
    def _with_its_own_settings(cls, raw: Any) -> Any:
        """Fill in the defaults that depend on the optimizer, from `_OWN_SETTINGS` and `_FUSED`."""
        if not isinstance(raw, dict):
            return raw
        name = raw.get("name", cls.model_fields["name"].default)
        own = _OWN_SETTINGS.get(name, {}) if isinstance(name, str) else {}
        given = {key: value for key, value in raw.items() if value is not None or key not in _OF_SOME}
        return own | {"fused_backward": name in _FUSED and not raw.get("offload")} | given

    @model_validator(mode="after")
    def _no_setting_of_another(self) -> "OptimizerConfig":
        """Raise `ValueError` for settings that the optimizer would ignore or that cannot be combined."""
        own = _OWN_SETTINGS.get(self.name, {})
        for key in _OF_SOME:
            if key not in own and getattr(self, key) is not None:
                raise ValueError(f"{self.name} has no {key}; leave it out")
        if self.offload and (self.fused_backward or self.master_weights == "stochastic" or self.name == "lomo"):
            wrong = "fused_backward, master_weights: stochastic and lomo"
            raise ValueError(f"offload updates weights on the host, after the backward pass; leave {wrong} out")
        if self.betas is not None and len(self.betas) != len(own["betas"]):
            raise ValueError(f"{self.name} has {len(own['betas'])} betas, not {len(self.betas)}")
        return self


class PartOptimizers(Section):
    """A separate optimizer for each part that trains; None for a part that does not train.

    `experts` is for experts in full precision, `lora` for all low-rank factors, `other` for all the rest.
    """

    router: OptimizerConfig | None = None
    experts: OptimizerConfig | None = None
    lora: OptimizerConfig | None = None
    other: OptimizerConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _not_both_forms(cls, raw: Any) -> Any:
        """Raise `ValueError` if `optimizer:` has settings of a single optimizer, such as `lr`, beside parts."""
        if both := [key for key in raw if key in OptimizerConfig.model_fields]:
            parts, own = ", ".join(PARTS), ", ".join(both)
            raise ValueError(f"is either one optimizer (name, lr, …) or one for each part ({parts}); move {own} there")
        return raw


def _one_or_by_part(raw: Any) -> str:
    by_part = isinstance(raw, PartOptimizers) or (isinstance(raw, dict) and any(key in PARTS for key in raw))
    return "by_part" if by_part else "one"


OneOrByPart = Annotated[
    Annotated[OptimizerConfig, Tag("one")] | Annotated[PartOptimizers, Tag("by_part")], Discriminator(_one_or_by_part)
]
