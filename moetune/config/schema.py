"""`RunConfig` and its sections: every key of a run file with its type, default and checks.

One file, which reads in the order of a run file, because sections check each other. Nothing here imports torch.
"""

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
    HostSize,
    Ids,
    KeepRows,
    LossMemory,
    NonNegative,
    Positive,
    Size,
    Strength,
    Text,
)
from moetune.config.lora_rank import LoraRank, is_by_target
from moetune.errors import counted, suggest


class Section(BaseModel):
    """A section of the run file: an immutable pydantic model that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, serialize_by_alias=True)

    def but(self, **changes: Any) -> Self:
        """Return a copy with some values changed; nothing is validated.

        For a key that holds a section, a dict of some of the section's keys changes only these. Any other dict, such as
        ids by layer, replaces the section.
        """
        sections = {key: part for key in changes if isinstance(part := getattr(self, key), Section)}
        nested = {
            key: part.but(**new)
            for key, part in sections.items()
            if isinstance(new := changes[key], dict) and new.keys() <= type(part).model_fields.keys()
        }
        return self.model_copy(update=changes | nested)


QuantizedDtype = Literal["nf4", "int8", "fp8", "nvfp4", "mxfp4"]
Storage = Literal[QuantizedDtype, "bf16", "fp32"]
LINEAR_STORAGES: tuple[Storage, ...] = ("nf4", "int8", "fp8", "nvfp4")
"""Quantized storages of linear layers as well as of experts; MXFP4 is one of experts only."""
FP8_BLOCK = 128
"""Rows, and columns, of a block of weights that share one scale in the storage `fp8`."""
NV_BLOCK = 16
"""Consecutive weights of a row that share one scale in the storage `nvfp4`."""


class ModelConfig(Section):
    """The model, and how its frozen weights are stored (`model:`).

    Attributes:
        path: a catalog name, a local folder in hub format, or a hub id.
        weights: read the published weights, or draw random ones.
        base: precision in which frozen weights are stored; `auto` keeps the format of checkpoints in NF4, MXFP4,
            NVFP4 or FP8 and of quantized bases, and is nf4 for all others.
        double_quant: with nf4, store the scales in 8 bits.
        dtype: dtype of compute and of trained weights; `auto` is bf16 on a GPU and fp32 on a CPU.
        attention: the attention implementation, by transformers' name; `auto` is sdpa if it computes the model's
            attention, else eager.
        experts_on: where quantized experts are kept: in GPU memory, or in pinned host memory.
    """

    path: FilePath
    weights: Literal["pretrained", "random"] = "pretrained"
    base: Literal["auto", Storage] = "auto"
    double_quant: bool = True
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    experts_on: Literal["gpu", "host"] = "gpu"


Rule = Literal["tokens", "gate", "reap", "foreground", "random", "least"]
SIZES = ("p", "k", "experts", "parameters", "budget")
"""Keys of `ChoiceConfig` that set the number of chosen experts; exactly one of them is given."""


class ChoiceConfig(Section):
    """A choice of experts by recorded scores, made separately in each layer (docs/concepts/choosing-experts.md).

    Exactly one of `p`, `k`, `experts`, `parameters` and `budget` is given. With all but `p`, every layer gets equally
    many experts (with a fractional budget, the same fraction).

    Attributes:
        from_: path of a `scores.json` file (the key `from`).
        rule: what experts are ranked by, best first: most `tokens` routed to the expert, largest sum of routing weights
            (`gate`), largest `reap` score (arXiv 2510.13999), or largest difference of token shares to `background`
            (`foreground`); as baselines, `random` order, or fewest tokens (`least`).
        p: take the shortest prefix of the ranking whose share of the routing reaches `p`.
        k: number of experts in each layer.
        experts: upper bound of the number of experts in all layers together.
        parameters: upper bound of the number of trained parameters in all layers together.
        budget: a fraction of each layer's experts, or the memory that the run may use, such as `44GiB`.
        background: path of a second `scores.json`, for the rule `foreground`; None for all others.
        layers: layers to choose in.
        seed: seed of the rule `random`.
    """

    from_: FilePath = Field(alias="from")
    rule: Rule = "tokens"
    p: Annotated[float, Field(gt=0, le=1)] | None = None
    k: Positive | None = None
    experts: Positive | None = None
    parameters: Positive | None = None
    budget: Budget | None = None
    background: FilePath | None = None
    layers: Ids = "all"
    seed: NonNegative = 0

    @model_validator(mode="after")
    def _one_size(self) -> ChoiceConfig:
        """Raise `ValueError` unless exactly one size is set and the rule goes with `p` and `background`."""
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
    """Return which alternative of a union `raw` is: "ids or layers", or "a choice" by scores."""
    chosen = isinstance(raw, ChoiceConfig) or (isinstance(raw, dict) and "from" in raw)
    return "a choice" if chosen else "ids or layers"


class ExpertsConfig(Section):
    """Experts that train in full precision (`adapt.experts`).

    Attributes:
        layers: layers whose experts train; must be `all` if `ids` is a mapping.
        ids: expert ids, the same in each of `layers`; or a mapping layer index -> expert ids.
    """

    layers: Ids = "all"
    ids: ExpertIds = "all"

    @model_validator(mode="after")
    def _layers_once(self) -> ExpertsConfig:
        """Raise `ValueError` if `ids` already names layers and `layers` is set too."""
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
    """Low-rank factors A and B on frozen linear layers and experts (`adapt.lora`): W + scale · B · A.

    Attributes:
        rank: rows of A and columns of B: one number, or one for each target, for layers, or for layers of a target.
        alpha: the scale is alpha / rank.
        rslora: the scale is alpha / √rank instead (arXiv 2312.03732).
        dropout: dropout probability on the input of linear layers; must be 0 for experts.
        lr_ratio: learning rate of B over that of A (LoRA+, arXiv 2402.12354).
        targets: components (`attention`, `experts`, …), module names (`q_proj`) or patterns of module paths.
        layers: layers that get factors.
        ids: experts that get factors, if `targets` includes `experts`.
        gate_up: `fused` shares one A between an expert's gate and up projections; `split` gives each its own.
    """

    rank: LoraRank
    alpha: Annotated[float, Field(ge=1e-6, le=1e6)]
    rslora: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    lr_ratio: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    targets: tuple[Text, ...] = Field(default=("attention", "experts"), min_length=1)
    layers: Ids = "all"
    ids: IdsOrChoice = "all"
    gate_up: Literal["fused", "split"] = "fused"

    @model_validator(mode="after")
    def _a_rank_for_each_target(self) -> LoraConfig:
        """Raise `ValueError` if `rank` names targets, but lacks one of `targets`, or has one that is not among them."""
        if isinstance(self.rank, dict) and is_by_target(self.rank):
            for key in self.rank:
                if key not in self.targets:
                    raise ValueError(f"rank: {key!r} is not in targets.{suggest(key, self.targets)}")
            for target in self.targets:
                if target not in self.rank:
                    raise ValueError(f"rank: has no rank for {target!r}, which is in targets; add {target}: 8")
        return self

    def plain_alpha(self, rank: int) -> float:
        """Return the alpha that gives factors of this rank the same scale without `rslora`."""
        return self.alpha * rank**0.5 if self.rslora else self.alpha

    def scale(self, rank: int) -> float:
        """Return the number that B · A of this rank is multiplied by."""
        return self.plain_alpha(rank) / rank


class AdaptConfig(Section):
    """Which parts of the model train, and how (`adapt:`).

    Attributes:
        router: layers whose router trains.
        experts: experts that train in full precision; None for no experts.
        lora: settings of LoRA; None for no LoRA.
        also: further components, or patterns of parameter names, that train in full precision.
        start_from: a folder with a PEFT adapter or a delta (hub/delta_folder.py) to initialize training from.
    """

    router: Ids = "none"
    experts: ExpertsOrChoice | None = None
    lora: LoraConfig | None = None
    also: tuple[Text, ...] = ()
    start_from: FilePath | None = None

    @property
    def has_memory_budget(self) -> bool:
        """Whether a choice of experts has a budget in bytes, so its size depends on predictions (routing/select.py)."""
        of_lora = None if self.lora is None else self.lora.ids
        return any(isinstance(one, ChoiceConfig) and isinstance(one.budget, str) for one in (self.experts, of_lora))


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
        betas: decay rates of the moments; None for optimizers without them.
        eps: term added to the denominator; None for optimizers without it.
        momentum: momentum of `sgd`; None for all others.
        master_weights: how 16-bit weights are updated: `none` in their own precision, `fp32` through a float32 copy
            that is kept, `stochastic` with stochastic rounding.
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
        """Fill in the defaults that depend on the optimizer."""
        if not isinstance(raw, dict):
            return raw
        name = raw.get("name", cls.model_fields["name"].default)
        own = _OWN_SETTINGS.get(name, {}) if isinstance(name, str) else {}
        given = {key: value for key, value in raw.items() if value is not None}
        return own | {"fused_backward": name in _FUSED and not raw.get("offload")} | given

    @model_validator(mode="after")
    def _no_setting_of_another(self) -> OptimizerConfig:
        """Raise `ValueError` for settings that the optimizer would ignore or that cannot be combined."""
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
    """A separate optimizer for each part that trains (see `PARTS`); None for a part that does not train."""

    router: OptimizerConfig | None = None
    experts: OptimizerConfig | None = None
    lora: OptimizerConfig | None = None
    other: OptimizerConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _not_both_forms(cls, raw: Any) -> Any:
        """Raise `ValueError` if `optimizer:` has settings of a single optimizer, such as `lr`, beside parts."""
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


class EarlyStoppingConfig(Section):
    """End training when the held-out loss no longer falls, and keep its best checkpoint (`train.early_stopping:`).

    Attributes:
        patience: training ends after this many evaluations in a row that are no better than the best before them.
    """

    patience: Positive = 3


class KeptConfig(Section):
    """Layers that keep more than their input for backward (`train.checkpointing:` as a section).

    Attributes:
        attention: layers that keep the outputs of attention's kernels.
        rows: layers with experts that keep the rows of gate_up.
        rest: layers that keep everything but the rows of gate_up, so that they are not recomputed.
    """

    attention: Ids = "none"
    rows: Ids = "none"
    rest: Ids = "none"


def _word_or_section(raw: Any) -> str:
    return "by layer" if isinstance(raw, (dict, KeptConfig)) else "word"


CheckpointingWord = Literal["auto", "none", "experts_only", "full", "offload"]
Checkpointing = Annotated[
    Annotated[CheckpointingWord, Tag("word")] | Annotated[KeptConfig, Tag("by layer")], Discriminator(_word_or_section)
]


class TrainConfig(Section):
    """The training loop (`train:`). A step is one optimizer update; docs/reference/run-file.md describes every key.

    Attributes:
        micro_batch: sequences in one forward and backward pass.
        accumulate: forward and backward passes per step.
        sequence_length: tokens per sequence.
        steps: length of the training in steps.
        epochs: length of the training in passes over the data, instead of `steps`; None if `steps` sets it.
        checkpointing: activations that are recomputed in the backward pass: none, those of experts, or all but each
            layer's input, which `offload` keeps in host memory. A section names the layers that keep more than that;
            `auto` chooses them, as many as fit the GPU.
        keep_rows: number of layers, the last ones, whose gate_up rows are kept for backward instead of being computed
            again; `auto` is as many as fit the GPU, `none` none. `checkpointing: none` keeps those of all layers.
        log_every: steps between two lines of metrics.
        eval_every: steps between two evaluations.
        save_every: steps between two checkpoints.
        keep_checkpoints: number of newest checkpoints to keep.
        early_stopping: when to end before `steps`; None to run them all.
        eval_micro_batch: sequences in one forward pass of an evaluation; None for `micro_batch`.
        warmup: steps of linear warm-up.
        schedule: the learning rate after the warm-up: constant, or linear or cosine decay to zero.
        max_grad_norm: gradients are clipped to this norm; 0 does not clip.
        max_grad_value: bound of each gradient element, applied before the norm is clipped; 0 does not clip.
        on_nonfinite: if a gradient is NaN or infinite, end the run or skip the update.
        on_oom: when memory runs out, end the run or repeat the step with half the micro-batch.
        router_aux_loss: coefficient of the load-balancing loss; `auto` is the architecture's own.
        router_aux_scope: balance the sum over layers, or each layer.
        router_z_loss: coefficient of the router z-loss.
        dense_router_gradient: compute the routers' gradient through all experts (DenseMixer).
        router_bias_rate: step size of correction biases; 0 does not update them.
        loss_memory: memory of logits that the loss may hold at once; `none` for no limit, `auto` for what the backward
            pass of a layer takes, at least 256 MiB.
        expert_memory: memory of dequantized experts that are computed together; `0` for one expert at a time.
        neftune_alpha: strength of noise on embeddings (NEFTune, arXiv 2310.05914); 0 for none.
        report_to: names of accelerate's trackers.
    """

    micro_batch: Size = 1
    accumulate: Size = 8
    sequence_length: Annotated[int, Field(ge=2, le=2**24)] = 2048
    steps: Positive = 200
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    checkpointing: Checkpointing = "full"
    keep_rows: KeepRows = "none"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    log_every: Positive = 1
    eval_every: Positive = 50
    save_every: Positive = 50
    keep_checkpoints: Positive = 3
    early_stopping: EarlyStoppingConfig | None = None
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
    loss_memory: LossMemory = "auto"
    expert_memory: ExpertMemory = "auto"
    neftune_alpha: Strength = 0.0
    report_to: Annotated[
        tuple[Text, ...], BeforeValidator(lambda v: (() if v == "none" else (v,)) if isinstance(v, str) else v)
    ] = ()

    @model_validator(mode="before")
    @classmethod
    def _no_steps(cls, raw: Any) -> Any:
        """Treat `steps: null` as if the key were missing, so that the default applies."""
        return {k: v for k, v in raw.items() if (k, v) != ("steps", None)} if isinstance(raw, dict) else raw

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        """Raise `ValueError` if both `steps` and `epochs` are set."""
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError("steps and epochs both say how long to train; leave one out")
        return self

    @model_validator(mode="after")
    def _rows_kept_once(self) -> TrainConfig:
        """Raise `ValueError` if `keep_rows` is set although `checkpointing` says which layers keep their rows."""
        if self.checkpointing == "none" and isinstance(self.keep_rows, int):
            raise ValueError(
                f"keep_rows: {self.keep_rows}, and checkpointing: none keeps the rows of all layers; leave keep_rows "
                "out, or set checkpointing: experts_only"
            )
        if self.keep_rows != "none" and (self.checkpointing == "auto" or isinstance(self.checkpointing, KeptConfig)):
            which = "auto chooses" if self.checkpointing == "auto" else "rows: names"
            raise ValueError(
                f"keep_rows: {self.keep_rows}, and checkpointing: {which} the layers that keep their rows; leave "
                "keep_rows out"
            )
        return self


class WeightedData(Section):
    """One of several data sets.

    Attributes:
        path: a file, folder, catalog data set or hub data set.
        weight: how often each record occurs in an epoch; 0.5 takes a random half of the records.
    """

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
    """Training and evaluation data (`data:`).

    A data set is a file, a folder, a catalog data set, or a hub data set (`org/name:config:split`).

    Attributes:
        train: one data set or several.
        eval: data sets for evaluation; None for none.
        packing: fill each sequence with several documents, which do not attend to each other.
        chat_template: a file, or a model whose template is used; None for the tokenizer's own.
        too_long: what to do with prompts and chats longer than a sequence.
        validation: fraction of the training records to hold out for evaluation, if `eval` is not given; None for none.
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
        """Raise `ValueError` if both `validation` and `eval` are set."""
        if self.eval is not None and self.validation is not None:
            raise ValueError("validation splits held-out records off the training data, and eval names some; leave one")
        return self

    @property
    def evaluates(self) -> bool:
        """Whether the run has held-out data."""
        return self.eval is not None or self.validation is not None


def data_sets(written: str | Sequence[str | WeightedData] | None) -> list[tuple[str, float]]:
    """Return (name, weight) of each data set under `data.train` or `data.eval`; an empty list for None."""
    several = (written,) if isinstance(written, str) else written or ()
    return [(one, 1.0) if isinstance(one, str) else (one.path, one.weight) for one in several]


class ParallelConfig(Section):
    """The ranks of a run (`parallel:`): replicate · fsdp · tp · pp processes with a GPU each.

    Attributes:
        engine: FSDP2 of torch, or DeepSpeed.
        fsdp: ranks that share one copy of the model and the optimizer states, and read different data.
        ep: number of ranks that each layer's experts are divided over, out of the replicate · fsdp · tp ranks; adds no
            rank.
        tp: ranks that split the matrices of attention, and read the same data.
        pp: pipeline stages; more than 1 is refused.
        replicate: groups of `fsdp` ranks, each with a copy of the model; they read different data.
        zero: what `fsdp` ranks share: 1 optimizer states, 2 also gradients, 3 also weights.
        reshard: with `zero: 3`, free gathered weights between forward and backward.
        deepspeed: a JSON file with further settings for DeepSpeed; None for none.
        offload: `optimizer` updates on the host (ZeRO-Offload of DeepSpeed).
        load: a file with tokens per expert, such as a run's memory.json, to balance experts over `ep` ranks; None to
            assume an even load.
        timeout: seconds that a rank waits for another.
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
        """Number of ranks: replicate · fsdp · tp · pp."""
        return self.replicate * self.fsdp * self.tp * self.pp

    @model_validator(mode="after")
    def _consistent(self) -> ParallelConfig:
        """Raise `ValueError` for `deepspeed:` without its engine, and for an `ep` that does not divide the ranks."""
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
    """The GPUs that memory is predicted for (`hardware:`). Training itself runs on this machine's GPUs.

    Attributes:
        gpu: a name of the GPU catalog such as `l40s`, or a memory size such as `44GiB`; None to predict without a
            limit.
        host_memory: bytes of memory that the machine of the GPUs has for the run, such as `64GiB`. None: not known, but
            for a prediction for the GPU of this machine, of which it is what is free now.
        count: number of GPUs. `RunConfig` sets it to the number of ranks if it is not given, and refuses any other
            number.
        without_kernels: operators that run torch's operations instead of their kernel on a GPU, in training and in
            predictions. A run adds those whose kernel does not work on its machine (adapt/guard).
    """

    gpu: Text | None = None
    host_memory: HostSize | None = None
    count: Size = 1
    without_kernels: tuple[Text, ...] = ()


class RunConfig(Section):
    """A run file as written, validated: values may be `auto`, and experts may be chosen by scores.

    `ResolvedConfig` (config/resolved.py) is the run file with the values that depend on the model filled in.

    Attributes:
        optimizer: one optimizer for all parts, or one for each part.
        data: required for training; None for a run that is only predicted.
        output: the run folder, relative to the working directory; required for training.
    """

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
        """Set `hardware.count` to the number of ranks if it is not given."""
        given = hardware.model_fields_set
        if "count" in given or "parallel" not in info.data:
            return hardware
        return hardware.model_copy(update={"count": info.data["parallel"].ranks})

    @property
    def packs(self) -> bool:
        """Whether a sequence may hold several documents; True for a run file without data."""
        return self.data is None or self.data.packing

    @property
    def optimizers(self) -> dict[Part, OptimizerConfig]:
        """Part -> its optimizer; parts without an optimizer are left out."""
        if isinstance(self.optimizer, OptimizerConfig):
            return dict.fromkeys(PARTS, self.optimizer)
        return {part: optimizer for part in PARTS if (optimizer := getattr(self.optimizer, part)) is not None}

    @model_validator(mode="after")
    def _fused_steps_are_single(self) -> RunConfig:
        """Raise `ValueError` for `fused_backward` with more than one micro-step per update."""
        fused = {optimizer.name: None for optimizer in self.optimizers.values() if optimizer.fused_backward}
        if self.train.accumulate > 1 and fused:
            raise ValueError(
                f"{', '.join(fused)} with optimizer.fused_backward frees each gradient as soon as it is used, so those "
                f"of {self.train.accumulate} micro-steps cannot be summed; set train.accumulate: 1 (and raise "
                "train.micro_batch if there is room)"
            )
        return self

    @model_validator(mode="after")
    def _stops_by_held_out_loss(self) -> RunConfig:
        """Raise `ValueError` for early stopping without held-out data."""
        if self.train.early_stopping is not None and self.data is not None and not self.data.evaluates:
            raise ValueError(
                "train.early_stopping watches the held-out loss, and there is no held-out data; set data.eval, or "
                "data.validation: 0.05 to hold out a part of data.train"
            )
        return self

    @model_validator(mode="after")
    def _as_many_gpus_as_ranks(self) -> RunConfig:
        """Raise `ValueError` if `hardware.count` is not the number of ranks."""
        if self.parallel.ranks != self.hardware.count:
            raise ValueError(
                f"parallel: asks for {counted(self.parallel.ranks, 'rank')} and hardware.count is "
                f"{self.hardware.count}; set hardware.count: {self.parallel.ranks}"
            )
        return self

    def to_yaml(self) -> str:
        """Return the run file as YAML with every default written out; reading it gives an equal `RunConfig`."""
        one_length = {"train": {"steps"}} if self.train.epochs is not None else None
        return yaml.safe_dump(self.model_dump(mode="json", exclude=one_length), sort_keys=False, allow_unicode=True)
