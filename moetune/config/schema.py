"""The run file: what a user writes, as typed values. run_file.py reads it. Nothing here imports torch."""

from __future__ import annotations

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

from moetune.config.fields import (
    Count,
    Decay,
    ExpertIds,
    FilePath,
    Ids,
    Positive,
    Size,
    Strength,
    Text,
    check_budget,
    check_coefficient,
    check_expert_memory,
    check_memory,
)
from moetune.config.sizes import parse_size
from moetune.errors import counted


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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

    @property
    def storage(self) -> Storage:
        """What `base` is, of a model that is resolved."""
        assert self.base != "auto"
        return self.base


Rule = Literal["tokens", "gate", "reap", "foreground", "random", "least"]
SIZES = ("p", "k", "experts", "parameters", "budget")
"""How many experts a choice takes: one of these says it."""


class ChoiceConfig(Section):
    """Experts that recorded scores choose, in each layer by itself. docs/concepts/choosing-experts.md has the rules.

    How many is said by one of: `p`, the smallest prefix of the ranking whose share reaches it; `k` of each layer; at
    most so many `experts`, or their `parameters`, in all; `budget`, a share of each layer's experts, or the memory that
    the run shall fit. But for `p`, each layer has equally many.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, serialize_by_alias=True)

    from_: str = Field(alias="from", min_length=1)
    rule: Rule = "tokens"
    p: Annotated[float, Field(gt=0, le=1)] | None = None
    k: Positive | None = None
    experts: Positive | None = None
    parameters: Positive | None = None
    budget: Annotated[str | float | None, BeforeValidator(lambda v: v if v is None else check_budget(v))] = None
    background: str | None = Field(default=None, min_length=1)
    layers: Ids = "all"
    seed: Count = 0

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
    """Low-rank factors. `gate_up` says whether an expert's gate and up projections share one A or have one each.

    `rslora` divides alpha by the root of the rank (arXiv 2312.03732); `lr_ratio` is how many times A's learning rate B
    has (LoRA+, arXiv 2402.12354); `dropout` is of the input of linear layers.
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
        """The alpha that LoRA without `rslora` has with the same scale."""
        return self.alpha * self.rank**0.5 if self.rslora else self.alpha

    @property
    def scale(self) -> float:
        """What B·A is multiplied with."""
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
        """Whether how many experts are chosen takes predictions of the run (routing/select.py)."""
        of_lora = None if self.lora is None else self.lora.ids
        return any(isinstance(one, ChoiceConfig) and isinstance(one.budget, str) for one in (self.experts, of_lora))


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
    warmup: Count = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    max_grad_norm: Strength = 1.0
    max_grad_value: Strength = 0.0
    on_nonfinite: Literal["stop", "skip"] = "stop"
    on_oom: Literal["error", "halve_micro_batch"] = "error"
    router_aux_loss: Annotated[float | str, BeforeValidator(check_coefficient)] = 0.0
    router_aux_scope: Literal["model", "layer"] = "model"
    router_z_loss: Strength = 0.0
    dense_router_gradient: bool = False
    router_bias_rate: Strength = 0.0
    loss_memory: Annotated[str, BeforeValidator(check_memory)] = "256MiB"
    expert_memory: Annotated[str, BeforeValidator(check_expert_memory)] = "auto"
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
    def balance_coefficient(self) -> float:
        """Of the balance loss, of a run that is resolved."""
        assert not isinstance(self.router_aux_loss, str)
        return self.router_aux_loss

    @property
    def loss_bytes(self) -> int | None:
        """What the loss may hold at once of the logits, in bytes; None for all of them."""
        return None if self.loss_memory == "none" else parse_size(self.loss_memory)


class WeightedData(Section):
    """One of several data sets: an epoch has each of its records `weight` times, 0.5 being a random half of them."""

    path: FilePath
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0


OneOrSeveral = Annotated[
    Annotated[FilePath, Tag("one")]
    | Annotated[
        tuple[
            Annotated[
                Annotated[FilePath, Tag("one")] | Annotated[WeightedData, Tag("weighted")],
                Discriminator(lambda raw: "one" if isinstance(raw, str) else "weighted"),
            ],
            ...,
        ],
        Field(min_length=1),
        Tag("several"),
    ],
    Discriminator(lambda raw: "several" if isinstance(raw, (list, tuple)) else "one"),
]


class DataConfig(Section):
    """Where examples come from: files, folders, `catalog` data sets, or hub data sets (`org/name:config:split`).

    `chat_template` is a file, or a model whose template is taken. `too_long` says what becomes of a prompt or chat that
    does not fit a sequence. `validation` is the share of the training records that are held out where `eval` is not
    given.
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
    """`gpu` is a name of the catalog or a size such as 44GiB; `count` is how many of them, by default one a rank."""

    gpu: Text | None = None
    count: Size = 1


class RunConfig(Section):
    """A whole run file."""

    model: ModelConfig
    adapt: AdaptConfig
    optimizer: OneOrByPart = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    data: DataConfig | None = None
    parallel: ParallelConfig = ParallelConfig()
    hardware: HardwareConfig = HardwareConfig()
    output: FilePath | None = None

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
        if "count" not in self.hardware.model_fields_set:
            hardware = self.hardware.model_copy()
            hardware.__dict__["count"] = self.parallel.ranks
            self.__dict__["hardware"] = hardware
        if self.parallel.ranks != self.hardware.count:
            raise ValueError(
                f"parallel: asks for {counted(self.parallel.ranks, 'rank')} and hardware.count is "
                f"{self.hardware.count}; set hardware.count: {self.parallel.ranks}"
            )
        return self

    def to_yaml(self) -> str:
        """The resolved run file: every value spelled out, so that it reads back equal."""
        one_length = {"train": {"steps"}} if self.train.epochs is not None else None
        return yaml.safe_dump(self.model_dump(mode="json", exclude=one_length), sort_keys=False, allow_unicode=True)
