"""The run file: what a user writes, as typed values. run_file.py reads it. Nothing here imports torch."""

from __future__ import annotations

import re
import typing
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from moetune.sizes import HOW_TO_WRITE_A_SIZE, parse_size

IdSet = Literal["all", "none"] | tuple[int, ...]
"""Layer or expert numbers: every one, no one, or those listed."""


def parse_ids(value: object) -> object:
    """Turns `"0-5,8"`, `3` or `[0, 1, "4-6"]` into a sorted tuple of ints; `all` and `none` stay as they are.

    Raises:
        ValueError: the text is no such list, or a range runs backwards.
    """
    if value in ("all", "none"):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, str, list, tuple)):
        raise ValueError(f'{value!r} is not a list of numbers; write all, none, 3, [0, 1] or "0-5,8"')
    words = value if isinstance(value, (list, tuple)) else str(value).split(",")
    ids: set[int] = set()
    for word in words:
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", str(word))
        if match is None:
            raise ValueError(f'{str(word).strip()!r} is not a number or a range; write all, none, 3, [0, 1] or "0-5,8"')
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f'range {word!r} runs backwards; write "{last}-{first}"')
        ids.update(range(first, last + 1))
    if not ids:
        raise ValueError("the list is empty; write none to choose nothing")
    return tuple(sorted(ids))


def check_expert_memory(value: object) -> object:
    """Passes a size, 0 or `auto`, as it is written.

    Raises:
        ValueError: it is none of these.
    """
    if value == 0 and not isinstance(value, bool):
        return "0"
    if value in ("0", "auto") or (isinstance(value, str) and (parse_size(value) or -1) > 0):
        return value
    raise ValueError(f"{value!r} is neither a size nor 0 nor auto. {HOW_TO_WRITE_A_SIZE}")


def check_memory(value: object) -> object:
    """Passes a size above zero, or `none`, as it is written.

    Raises:
        ValueError: it is neither.
    """
    if value == "none" or (isinstance(value, str) and (parse_size(value) or 0) > 0):
        return value
    raise ValueError(f"{value!r} is neither a size above zero nor none. {HOW_TO_WRITE_A_SIZE}")


Ids = Annotated[IdSet, BeforeValidator(parse_ids)]
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(Section):
    """Which model, and how what stays frozen is stored."""

    path: str = Field(min_length=1)
    weights: Literal["pretrained", "random"] = "pretrained"
    base: Literal["nf4", "int8", "bf16", "fp32"] = "nf4"
    double_quant: bool = True
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    experts_on: Literal["gpu", "host"] = "gpu"


class ExpertsConfig(Section):
    """Whole experts that train in full precision: `ids` of each of `layers`."""

    layers: Ids = "all"
    ids: Ids = "all"


class LoraConfig(Section):
    """Low-rank factors. `gate_up` says whether an expert's gate and up projections share one A or have one each."""

    rank: Positive
    alpha: Annotated[float, Field(gt=0)]
    targets: tuple[str, ...] = Field(default=("attention", "experts"), min_length=1)
    layers: Ids = "all"
    ids: Ids = "all"
    gate_up: Literal["fused", "split"] = "fused"


class AdaptConfig(Section):
    """Which parts of the model train, and how. `start_from` is a folder with an adapter or a delta of these parts."""

    router: Ids = "none"
    experts: ExpertsConfig | None = None
    lora: LoraConfig | None = None
    also: tuple[str, ...] = ()
    start_from: str | None = Field(default=None, min_length=1)


OptimizerName = Literal[
    "adamw", "adamw8bit", "paged_adamw", "paged_adamw8bit", "lion8bit", "ademamix8bit", "adafactor", "sgd", "lomo",
    "adalomo",
]  # fmt: skip
Part = Literal["router", "experts", "lora", "other"]
PARTS: tuple[Part, ...] = typing.get_args(Part)
_FUSED = ("lomo", "adalomo")  # what their papers are about; a plain backward is to be had by asking for it
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
"""Settings that some optimizers have and others have not, with their defaults."""


class OptimizerConfig(Section):
    """One optimizer.

    `master_weights` is how weights of 16 bits are updated: in their own precision, through a float32 copy, or rounded
    stochastically. `fused_backward` updates each parameter when its gradient is complete and frees the gradient.
    `offload` keeps states and float32 weights in host memory and updates there: gradients go out, weights come back.
    """

    name: OptimizerName = "adamw8bit"
    lr: Annotated[float, Field(gt=0)] = 1e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Decay, ...] | None = None
    eps: Annotated[float, Field(gt=0)] | None = None
    momentum: Decay | None = None
    master_weights: Literal["none", "fp32", "stochastic"] = "none"
    fused_backward: bool = False
    offload: bool = False

    @model_validator(mode="before")
    @classmethod
    def _with_its_own_settings(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        name = raw.get("name", cls.model_fields["name"].default)
        filled = {"fused_backward": name in _FUSED and not raw.get("offload")} | {
            k: v for k, v in raw.items() if v is not None
        }
        return (_OWN_SETTINGS.get(name, {}) if isinstance(name, str) else {}) | filled

    @model_validator(mode="after")
    def _no_setting_of_another(self) -> OptimizerConfig:
        """A setting that the optimizer does not have would be ignored."""
        own = _OWN_SETTINGS.get(self.name, {})
        for key in ("betas", "eps", "momentum"):
            if key not in own and getattr(self, key) is not None:
                raise ValueError(f"{self.name} has no {key}; leave it out")
        if self.offload and (self.fused_backward or self.master_weights == "stochastic" or self.name == "lomo"):
            raise ValueError(
                "offload updates float32 weights on the host after the backward pass, and gradients leave the GPU as "
                "they come; leave fused_backward, master_weights: stochastic and lomo out"
            )
        if self.betas is not None and len(self.betas) != len(own["betas"]):
            raise ValueError(f"{self.name} has {len(own['betas'])} betas, not {len(self.betas)}")
        return self


class PartOptimizers(Section):
    """An optimizer for each part that trains: routers, whole experts, LoRA factors, and what `adapt.also` names."""

    @model_validator(mode="before")
    @classmethod
    def _not_both_forms(cls, raw: Any) -> Any:
        if both := [key for key in raw if key in OptimizerConfig.model_fields]:
            raise ValueError(
                f"is either one optimizer (name, lr, …) or one for each part ({', '.join(PARTS)}); move "
                f"{', '.join(both)} under the parts"
            )
        return raw

    router: OptimizerConfig | None = None
    experts: OptimizerConfig | None = None
    lora: OptimizerConfig | None = None
    other: OptimizerConfig | None = None


def _one_or_by_part(raw: Any) -> str:
    by_part = isinstance(raw, PartOptimizers) or (isinstance(raw, dict) and any(key in PARTS for key in raw))
    return "by_part" if by_part else "one"


OneOrByPart = Annotated[
    Annotated[OptimizerConfig, Tag("one")] | Annotated[PartOptimizers, Tag("by_part")], Discriminator(_one_or_by_part)
]


class TrainConfig(Section):
    micro_batch: Positive = 1
    accumulate: Positive = 8
    sequence_length: Annotated[int, Field(ge=2)] = 2048
    steps: Positive = 200
    checkpointing: Literal["none", "experts_only", "full", "offload"] = "full"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    log_every: Positive = 1
    eval_every: Positive = 50
    save_every: Positive = 50
    keep_checkpoints: Positive = 3
    eval_micro_batch: Positive | None = None
    warmup: Count = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    max_grad_value: Annotated[float, Field(ge=0)] = 0.0
    on_nonfinite: Literal["stop", "skip"] = "stop"
    router_aux_loss: Annotated[float, Field(ge=0)] = 0.0
    router_z_loss: Annotated[float, Field(ge=0)] = 0.0
    loss_memory: Annotated[str, BeforeValidator(check_memory)] = "256MiB"
    expert_memory: Annotated[str, BeforeValidator(check_expert_memory)] = "auto"
    report_to: tuple[str, ...] = ()

    @property
    def loss_bytes(self) -> int | None:
        """What the loss may hold at once of the logits, in bytes; None for all of them."""
        return None if self.loss_memory == "none" else parse_size(self.loss_memory)


class DataConfig(Section):
    """Where examples come from: files, `catalog` data sets, or hub data sets as `org/name` or `org/name:split`."""

    train: str = Field(min_length=1)
    eval: str | None = None
    format: Literal["auto", "text", "prompt", "chat"] = "auto"
    packing: bool = True


class ParallelConfig(Section):
    """How ranks share the work.

    There are `replicate · fsdp · tp · pp` ranks. `fsdp` ranks share one copy of model and optimizer, `replicate` such
    groups hold one each, and all of these see different data. `tp` ranks split every matrix, `pp` ranks split the
    layers. `ep` adds no rank: it spreads each layer's experts over that many of the `replicate · fsdp · tp` ranks.

    `zero` says what the `fsdp` ranks share: 1 optimizer states, 2 gradients as well, 3 weights as well. Under
    `reshard: false` gathered weights stay gathered from forward to backward. `offload: optimizer` keeps optimizer
    states and master weights on the host, and updates there; `deepspeed` is a JSON file with more of that engine's own
    settings. `load` is a file with the tokens that each expert is known
    to receive, such as a run's memory.json: experts are then spread over `ep` ranks so that these are balanced. A rank
    that waits for another longer than `timeout` seconds gives up.
    """

    engine: Literal["fsdp2", "deepspeed"] = "fsdp2"
    fsdp: Positive = 1
    ep: Positive = 1
    tp: Positive = 1
    pp: Positive = 1
    replicate: Positive = 1
    zero: Literal[1, 2, 3] = 3
    reshard: bool = True
    deepspeed: str | None = None
    offload: Literal["none", "optimizer"] = "none"
    load: str | None = None
    timeout: Positive = 600

    @property
    def ranks(self) -> int:
        return self.replicate * self.fsdp * self.tp * self.pp

    @model_validator(mode="after")
    def _settings_of_its_engine(self) -> ParallelConfig:
        if self.deepspeed is not None and self.engine != "deepspeed":
            raise ValueError("deepspeed: has settings of another engine; set engine: deepspeed, or leave it out")
        return self

    @model_validator(mode="after")
    def _experts_fit_the_ranks(self) -> ParallelConfig:
        sharing = self.replicate * self.fsdp * self.tp
        if sharing % self.ep:
            raise ValueError(
                f"ep {self.ep} does not divide the {sharing} ranks that replicate {self.replicate}, fsdp {self.fsdp} "
                f"and tp {self.tp} make; ep regroups those ranks, it adds none"
            )
        return self


class HardwareConfig(Section):
    """`gpu` is a name of the catalog or a size such as 44GiB; `count` is how many of them."""

    gpu: str | None = None
    count: Positive = 1


class RunConfig(Section):
    """A whole run file."""

    model: ModelConfig
    adapt: AdaptConfig
    optimizer: OneOrByPart = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    data: DataConfig | None = None
    parallel: ParallelConfig = ParallelConfig()
    hardware: HardwareConfig = HardwareConfig()
    output: str | None = None

    @property
    def optimizers(self) -> dict[Part, OptimizerConfig]:
        """The optimizer of each part that has one."""
        if isinstance(self.optimizer, OptimizerConfig):
            return dict.fromkeys(PARTS, self.optimizer)
        by_part = {part: getattr(self.optimizer, part) for part in PARTS}
        return {part: optimizer for part, optimizer in by_part.items() if optimizer is not None}

    @model_validator(mode="after")
    def _fused_steps_are_single(self) -> RunConfig:
        fused = {optimizer.name: None for optimizer in self.optimizers.values() if optimizer.fused_backward}
        if self.train.accumulate > 1 and fused:
            raise ValueError(
                f"{', '.join(fused)} with optimizer.fused_backward frees each gradient as it comes, so "
                f"{self.train.accumulate} micro-steps cannot add theirs up; set train.accumulate: 1 (and raise "
                "train.micro_batch if there is room)"
            )
        return self

    @model_validator(mode="after")
    def _as_many_gpus_as_ranks(self) -> RunConfig:
        if self.parallel.ranks != self.hardware.count:
            raise ValueError(
                f"parallel: asks for {self.parallel.ranks} ranks and hardware.count is {self.hardware.count}; "
                f"set hardware.count: {self.parallel.ranks}"
            )
        return self

    def to_yaml(self) -> str:
        """The resolved run file: every value spelled out, so that it reads back equal."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
