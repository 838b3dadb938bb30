"""The run file as typed values, as it is written: `load.py` reads it. Nothing here imports torch."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from moetune.config.fields import (
    Budget,
    Coefficient,
    Decay,
    ExpertIds,
    ExpertMemory,
    FilePath,
    Ids,
    LossMemory,
    NonNegative,
    Positive,
    Size,
    Strength,
    Text,
)
from moetune.config.sizes import parse_size
from moetune.errors import counted


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, serialize_by_alias=True)

    def but(self, **changes: Any) -> Self:
        """Return a copy with these values, which are not validated; a dict changes keys of the section of that name."""
        sections = {key: part for key in changes if isinstance(part := getattr(self, key), Section)}
        nested = {key: part.but(**changes[key]) for key, part in sections.items() if isinstance(changes[key], dict)}
        return self.model_copy(update=changes | nested)


QuantizedDtype = Literal["nf4", "int8", "mxfp4"]
Storage = Literal[QuantizedDtype, "bf16", "fp32"]


class ModelConfig(Section):
    """Which model, and how what stays frozen is stored: `base: auto` is as the model is published, else nf4."""

    path: FilePath
    weights: Literal["pretrained", "random"] = "pretrained"
    base: Literal["auto", Storage] = "auto"
    double_quant: bool = True
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    experts_on: Literal["gpu", "host"] = "gpu"


Rule = Literal["tokens", "gate", "reap", "foreground", "random", "least"]
SIZES = ("p", "k", "experts", "parameters", "budget")
"""Keys for the number of experts that a choice takes; one of them is set."""


class ChoiceConfig(Section):
    """A choice of experts by recorded scores, layer by layer (docs/concepts/choosing-experts.md).

    One key sets their number: `p`, the smallest prefix of the ranking whose share reaches it; `k` of each layer; at
    most so many `experts`, or `parameters` of them, in all; `budget`, a share of each layer's experts, or the memory
    that the run may take. With all but `p`, every layer has equally many.
    """

    from_: str = Field(alias="from", min_length=1)
    rule: Rule = "tokens"
    p: Annotated[float, Field(gt=0, le=1)] | None = None
    k: Positive | None = None
    experts: Positive | None = None
    parameters: Positive | None = None
    budget: Budget | None = None
    background: Annotated[str, Field(min_length=1)] | None = None
    layers: Ids = "all"
    seed: NonNegative = 0

    @model_validator(mode="after")
    def _one_size(self) -> ChoiceConfig:
        given = [name for name in SIZES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"says how many experts {'by ' + ' and '.join(given) if given else 'in no way'}; set one of "
                f"{', '.join(SIZES)}"
            )
        if self.p is not None and self.rule not in ("tokens", "gate"):
            raise ValueError(f"p: is a share of tokens or of gate weight, and {self.rule} ranks by another; set k")
        if (self.background is not None) != (self.rule == "foreground"):
            raise ValueError("rule: foreground compares with background: FILE, and no other rule does")
        return self


def _ids_or_choice(raw: Any) -> str:
    chosen = isinstance(raw, ChoiceConfig) or (isinstance(raw, dict) and "from" in raw)
    return "a choice" if chosen else "ids or layers"


class ExpertsConfig(Section):
    """Whole experts that train in full precision: `ids` of each of `layers`, or those of each layer by its number."""

    layers: Ids = "all"
    ids: ExpertIds = "all"

    @model_validator(mode="after")
    def _layers_once(self) -> ExpertsConfig:
        if isinstance(self.ids, dict) and self.layers != "all":
            raise ValueError("ids: names the layers already; leave layers out")
        return self


ExpertsOrChoice = Annotated[
    Annotated[ExpertsConfig, Tag("ids or layers")] | Annotated[ChoiceConfig, Tag("a choice")],
    Discriminator(_ids_or_choice),
]
IdsOrChoice = Annotated[
    Annotated[ExpertIds, Tag("ids or layers")] | Annotated[ChoiceConfig, Tag("a choice")], Discriminator(_ids_or_choice)
]


class LoraConfig(Section):
    """Low-rank factors on linear layers and experts.

    With `gate_up: fused`, an expert's gate and up projections share one A. `rslora` divides alpha by the root of the
    rank (arXiv 2312.03732); `lr_ratio` is B's learning rate over A's (LoRA+, arXiv 2402.12354); `dropout` is of the
    input of linear layers.
    """

    rank: Size
    alpha: Annotated[float, Field(ge=1e-6, le=1e6)]
    rslora: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    lr_ratio: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    targets: tuple[Text, ...] = Field(default=("attention", "experts"), min_length=1)
    layers: Ids = "all"
    ids: IdsOrChoice = "all"
    gate_up: Literal["fused", "split"] = "fused"

    @property
    def plain_alpha(self) -> float:
        """Alpha of the same scale without `rslora`."""
        return self.alpha * self.rank**0.5 if self.rslora else self.alpha

    @property
    def scale(self) -> float:
        """The factor of B·A."""
        return self.plain_alpha / self.rank


class AdaptConfig(Section):
    """Which parts of the model train, and how. `start_from` is a folder with an adapter or a delta of these parts."""

    router: Ids = "none"
    experts: ExpertsOrChoice | None = None
    lora: LoraConfig | None = None
    also: tuple[Text, ...] = ()
    start_from: FilePath | None = None

    @property
    def has_memory_budget(self) -> bool:
        """Whether the number of chosen experts depends on predictions of the run (routing/select.py)."""
        of_lora = None if self.lora is None else self.lora.ids
        return any(isinstance(one, ChoiceConfig) and isinstance(one.budget, str) for one in (self.experts, of_lora))


OptimizerName = Literal[
    "adamw", "adamw8bit", "paged_adamw", "paged_adamw8bit", "lion8bit", "ademamix8bit", "adafactor", "sgd", "lomo",
    "adalomo",
]  # fmt: skip
Part = Literal["router", "experts", "lora", "other"]
PARTS: tuple[Part, ...] = typing.get_args(Part)
"""Groups of trained weights, each with an optimizer of its own if the run file gives one."""
_FUSED = ("lomo", "adalomo")  # fused_backward by default, as in their papers
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
"""Settings that only some optimizers have, with their defaults."""


class OptimizerConfig(Section):
    """One optimizer.

    `master_weights`: 16-bit weights are updated in their own precision, through a float32 copy, or with stochastic
    rounding. `fused_backward` updates each parameter once its gradient is complete and frees the gradient. `offload`
    keeps states and float32 weights in host memory and updates there.
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
        if not isinstance(raw, dict):
            return raw
        name = raw.get("name", cls.model_fields["name"].default)
        own = _OWN_SETTINGS.get(name, {}) if isinstance(name, str) else {}
        given = {key: value for key, value in raw.items() if value is not None}
        return own | {"fused_backward": name in _FUSED and not raw.get("offload")} | given

    @model_validator(mode="after")
    def _no_setting_of_another(self) -> OptimizerConfig:
        """Refuse settings that the optimizer would ignore."""
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
    """An optimizer for each part that trains: routers, whole experts, LoRA factors, and `adapt.also`."""

    router: OptimizerConfig | None = None
    experts: OptimizerConfig | None = None
    lora: OptimizerConfig | None = None
    other: OptimizerConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _not_both_forms(cls, raw: Any) -> Any:
        if both := [key for key in raw if key in OptimizerConfig.model_fields]:
            raise ValueError(
                f"is either one optimizer (name, lr, …) or one for each part ({', '.join(PARTS)}); move "
                f"{', '.join(both)} under the parts"
            )
        return raw


def _one_or_by_part(raw: Any) -> str:
    by_part = isinstance(raw, PartOptimizers) or (isinstance(raw, dict) and any(key in PARTS for key in raw))
    return "by_part" if by_part else "one"


OneOrByPart = Annotated[
    Annotated[OptimizerConfig, Tag("one")] | Annotated[PartOptimizers, Tag("by_part")], Discriminator(_one_or_by_part)
]


class TrainConfig(Section):
    micro_batch: Size = 1
    accumulate: Size = 8
    sequence_length: Annotated[int, Field(ge=2, le=2**24)] = 2048
    steps: Positive = 200
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    checkpointing: Literal["none", "experts_only", "full", "offload"] = "full"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    log_every: Positive = 1
    eval_every: Positive = 50
    save_every: Positive = 50
    keep_checkpoints: Positive = 3
    eval_micro_batch: Size | None = None
    warmup: NonNegative = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    max_grad_norm: Strength = 1.0
    max_grad_value: Strength = 0.0
    on_nonfinite: Literal["stop", "skip"] = "stop"
    on_oom: Literal["error", "halve_micro_batch"] = "error"
    router_aux_loss: Coefficient = 0.0
    router_aux_scope: Literal["model", "layer"] = "model"
    router_z_loss: Strength = 0.0
    dense_router_gradient: bool = False
    router_bias_rate: Strength = 0.0
    loss_memory: LossMemory = "256MiB"
    expert_memory: ExpertMemory = "auto"
    neftune_alpha: Strength = 0.0
    report_to: Annotated[
        tuple[Text, ...], BeforeValidator(lambda v: (() if v == "none" else (v,)) if isinstance(v, str) else v)
    ] = ()

    @model_validator(mode="before")
    @classmethod
    def _no_steps(cls, raw: Any) -> Any:
        """`steps: null` leaves them out, as `epochs: null` does."""
        return {k: v for k, v in raw.items() if (k, v) != ("steps", None)} if isinstance(raw, dict) else raw

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError("steps and epochs both say how long to train; leave one out")
        return self

    @property
    def loss_bytes(self) -> int | None:
        """Bytes of logits that the loss may hold at once; None for all of them."""
        return None if self.loss_memory == "none" else parse_size(self.loss_memory)


class WeightedData(Section):
    """One of several data sets. An epoch has each record `weight` times; 0.5 takes a random half of them."""

    path: FilePath
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0


_MaybeWeighted = Annotated[
    Annotated[FilePath, Tag("one")] | Annotated[WeightedData, Tag("weighted")],
    Discriminator(lambda raw: "one" if isinstance(raw, str) else "weighted"),
]
OneOrSeveral = Annotated[
    Annotated[FilePath, Tag("one")] | Annotated[tuple[_MaybeWeighted, ...], Field(min_length=1), Tag("several")],
    Discriminator(lambda raw: "several" if isinstance(raw, (list, tuple)) else "one"),
]


class DataConfig(Section):
    """Data sets: files, folders, `catalog` data sets, or hub data sets (`org/name:config:split`).

    `chat_template` is a file, or a model with a template. `too_long` is for prompts and chats longer than a sequence.
    `validation` is the share of the training records to hold out where `eval` is not given.
    """

    train: OneOrSeveral
    eval: OneOrSeveral | None = None
    format: Literal["auto", "text", "prompt", "chat", "alpaca", "sharegpt"] = "auto"
    packing: bool = True
    chat_template: FilePath | None = None
    too_long: Literal["error", "drop", "truncate"] = "error"
    validation: Annotated[float, Field(gt=0, lt=1)] | None = None

    @model_validator(mode="after")
    def _held_out_once(self) -> DataConfig:
        if self.eval is not None and self.validation is not None:
            raise ValueError("validation splits held-out records off the training data, and eval names some; leave one")
        return self

    @property
    def evaluates(self) -> bool:
        return self.eval is not None or self.validation is not None


def data_sets(written: str | Sequence[str | WeightedData] | None) -> list[tuple[str, float]]:
    """Return the name and the weight of each data set under `data.train` or `data.eval`."""
    several = (written,) if isinstance(written, str) else written or ()
    return [(one, 1.0) if isinstance(one, str) else (one.path, one.weight) for one in several]


class ParallelConfig(Section):
    """The ranks of a run: `replicate · fsdp · tp · pp` of them.

    `fsdp` ranks share one copy of model and optimizer, `replicate` such groups hold a copy each, and all of these read
    different data. `tp` ranks split every matrix, `pp` ranks the layers. `ep` adds no rank: it spreads each layer's
    experts over that many of the `replicate · fsdp · tp` ranks.

    `zero` is what `fsdp` ranks share: 1 optimizer states, 2 gradients as well, 3 weights as well. `reshard: false`
    keeps gathered weights from forward to backward. `offload: optimizer` updates on the host, with DeepSpeed, whose
    further settings are in the JSON file `deepspeed`. `load` is a file with tokens per expert, such as a run's
    memory.json, to balance over `ep` ranks. A rank waits for another at most `timeout` seconds.
    """

    engine: Literal["fsdp2", "deepspeed"] = "fsdp2"
    fsdp: Size = 1
    ep: Size = 1
    tp: Size = 1
    pp: Size = 1
    replicate: Size = 1
    zero: Literal[1, 2, 3] = 3
    reshard: bool = True
    deepspeed: FilePath | None = None
    offload: Literal["none", "optimizer"] = "none"
    load: FilePath | None = None
    timeout: Positive = 600

    @property
    def ranks(self) -> int:
        return self.replicate * self.fsdp * self.tp * self.pp

    @model_validator(mode="after")
    def _consistent(self) -> ParallelConfig:
        if self.deepspeed is not None and self.engine != "deepspeed":
            raise ValueError("deepspeed: has settings of another engine; set engine: deepspeed, or leave it out")
        sharing = self.replicate * self.fsdp * self.tp
        if sharing % self.ep:
            raise ValueError(
                f"ep {self.ep} does not divide the {sharing} ranks that replicate {self.replicate}, fsdp {self.fsdp} "
                f"and tp {self.tp} make; ep regroups those ranks, it adds none"
            )
        return self


class HardwareConfig(Section):
    """`gpu` is a catalog name or a size such as 44GiB; `count` is the number of cards, by default one per rank."""

    gpu: Text | None = None
    count: Size = 1


class RunConfig(Section):
    """A run file as it is written: keys may be `auto`, and experts chosen by scores."""

    model: ModelConfig
    adapt: AdaptConfig
    optimizer: OneOrByPart = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    data: DataConfig | None = None
    parallel: ParallelConfig = ParallelConfig()
    hardware: HardwareConfig = Field(default=HardwareConfig(), validate_default=True)
    output: FilePath | None = None

    @field_validator("hardware")
    @classmethod
    def _a_card_per_rank(cls, hardware: HardwareConfig, info: ValidationInfo) -> HardwareConfig:
        given = hardware.model_fields_set
        if "count" in given or "parallel" not in info.data:
            return hardware
        return HardwareConfig.model_construct(given, gpu=hardware.gpu, count=info.data["parallel"].ranks)

    @property
    def packs(self) -> bool:
        """Whether a row may hold several documents; a run file without data is assumed to."""
        return self.data is None or self.data.packing

    @property
    def optimizers(self) -> dict[Part, OptimizerConfig]:
        """Part -> its optimizer, if it has one."""
        if isinstance(self.optimizer, OptimizerConfig):
            return dict.fromkeys(PARTS, self.optimizer)
        return {part: optimizer for part in PARTS if (optimizer := getattr(self.optimizer, part)) is not None}

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
                f"parallel: asks for {counted(self.parallel.ranks, 'rank')} and hardware.count is "
                f"{self.hardware.count}; set hardware.count: {self.parallel.ranks}"
            )
        return self

    def to_yaml(self) -> str:
        """Return the run file with every value spelled out; it reads back equal."""
        one_length = {"train": {"steps"}} if self.train.epochs is not None else None
        return yaml.safe_dump(self.model_dump(mode="json", exclude=one_length), sort_keys=False, allow_unicode=True)
