"""The run file: what a user writes, as typed values.

`load_run_config` is the one door: it reads YAML, applies `--set` overrides and reports every problem of the file at
once, each with the nearest valid name. Nothing here imports torch.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from moetune.errors import UserError, suggest
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
    """How ranks share the work. Every combination can be predicted; training runs one process for now.

    There are `replicate · fsdp · tp · pp` ranks. `fsdp` ranks share one copy of model and optimizer, `replicate` such
    groups hold one each, and all of these see different data. `tp` ranks split every matrix, `pp` ranks split the
    layers. `ep` adds no rank: it spreads each layer's experts over that many of the `replicate · fsdp · tp` ranks.

    `zero` says what the `fsdp` ranks share: 1 optimizer states, 2 gradients as well, 3 weights as well. Under
    `reshard: false` gathered weights stay gathered from forward to backward. `offload: optimizer` keeps optimizer
    states and master weights on the host, and updates there.
    """

    engine: Literal["fsdp2", "deepspeed"] = "fsdp2"
    fsdp: Positive = 1
    ep: Positive = 1
    tp: Positive = 1
    pp: Positive = 1
    replicate: Positive = 1
    zero: Literal[1, 2, 3] = 3
    reshard: bool = True
    offload: Literal["none", "optimizer"] = "none"

    @property
    def ranks(self) -> int:
        return self.replicate * self.fsdp * self.tp * self.pp

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
                f"{', '.join(fused)} with optimizer.fused_backward uses each gradient up as it comes, so "
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


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML that refuses a key written twice; plain YAML keeps the last one and says nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # refused by what is called below
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is written twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)  # ValueError: a date such as 2025-02-30


def load_run_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a run file and applies `a.b=value` overrides, in order.

    Raises:
        UserError: the file is missing, is not YAML, or does not validate; every problem is listed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"run file {str(path)!r} cannot be read: {reason}") from None
    try:
        raw = yaml.load(text, Loader=_UniqueKeyLoader)
    except _YAML_ERRORS as error:
        reason = str(error).replace('"<unicode string>", ', "")
        raise UserError(f"run file {str(path)!r} is not valid YAML: {reason}") from None
    if not isinstance(raw, dict):
        raise UserError(f"run file {str(path)!r} must hold a mapping with model: and adapt:")
    for override in overrides:
        _apply_override(raw, override)
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        problems = "\n".join(f"  {line}" for line in _explain(error))
        raise UserError(f"run file {str(path)!r}:\n{problems}") from None


def require(config: RunConfig, command: str, *sections: Literal["data", "output"]) -> None:
    """Raises `UserError` if the command needs a section that the run file leaves out."""
    missing = [name for name in sections if getattr(config, name) is None]
    if missing:
        raise UserError(f"moetune {command} needs {' and '.join(f'{name}:' for name in missing)} in the run file")


def refuse_untrainable(config: RunConfig) -> None:
    """Raises `UserError` for settings that only the closed form knows so far."""
    default = RunConfig(model=config.model, adapt=config.adapt)
    settings = {"parallel": config.parallel != default.parallel}
    unbuilt = [name for name, is_set in settings.items() if is_set]
    if unbuilt:
        raise UserError(
            f"{', '.join(unbuilt)}: can be predicted (moetune predict --method formula), not trained or traced yet"
        )


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"--set {override!r}: write it as section.key=value, for example train.steps=100")
    try:
        value = yaml.load(text, Loader=_UniqueKeyLoader)
    except _YAML_ERRORS:
        raise UserError(f"--set {override!r}: the value {text!r} is not valid YAML") from None
    node = raw
    for depth, part in enumerate(parts[:-1]):
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            raise UserError(f"--set {override!r}: {'.'.join(parts[: depth + 1])} holds a value, not a section")
    node[parts[-1]] = value


def _explain(error: ValidationError) -> Iterable[str]:
    """One line a problem: where, what was written, what would be valid."""
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"] if part not in _UNION_TAGS)
        match item["type"]:
            case "extra_forbidden":
                known = _fields_at(item["loc"][:-1])
                hint = suggest(str(item["loc"][-1]), known) or f" Known keys: {', '.join(known)}."
                yield f"{where}: unknown key.{hint}"
            case "missing":
                yield f"{where}: missing, and required"
            case "literal_error":
                expected = item["ctx"]["expected"]
                hint = suggest(str(item["input"]), re.findall(r"'([^']*)'", expected))
                yield f"{where}: {item['input']!r} is not valid; it may be {expected}.{hint}"
            case "model_type":
                keys = ", ".join(_fields_at(item["loc"]))
                yield f"{where}: {item['input']!r} is not a section; write keys under it. Keys: {keys}"
            case "tuple_type":
                yield f"{where}: {item['input']!r} is not a list; write [{item['input']}]"
            case "value_error":
                yield f"{where}: {item['ctx']['error']}" if where else f"{item['ctx']['error']}"
            case _:
                yield f"{where}: {item['input']!r} is not valid: {item['msg']}"


_UNION_TAGS = frozenset({"literal['all','none']", "tuple[int, ...]", "tuple[int,...]", "one", "by_part"})


def _fields_at(location: Iterable[int | str]) -> list[str]:
    """The keys that the section at this place of the run file may hold."""
    section: type[BaseModel] = RunConfig
    for part in location:
        if part == "by_part":
            section = PartOptimizers
        elif part not in _UNION_TAGS:
            section = next(t for t in _leaves(section.model_fields[str(part)].annotation) if issubclass(t, BaseModel))
    return list(section.model_fields)


def _leaves(annotation: Any) -> list[type]:
    """The types in an annotation, whatever unions and annotations are around them."""
    inner = typing.get_args(annotation)
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) in (typing.Union, Annotated):
        return [leaf for option in inner for leaf in _leaves(option)]
    return [annotation] if isinstance(annotation, type) else []
