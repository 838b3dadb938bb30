"""`SourceQuantization`: the format in which a checkpoint is published, which decides `model.base: auto`."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from moetune.config.resolved import ResolvedBase, ResolvedBaseConfig, ResolvedModelConfig, resolved
from moetune.config.schema import BaseConfig, ModelConfig, Storage
from moetune.errors import UserError, shown
from moetune.json_files import read_json

Settings = Mapping[str, Any]
"""The `quantization_config` of a checkpoint."""
SETTINGS = (
    "quantization_config", "compression_config", "quantization", "quant_config", "quantize_config", "sparsity_config",
    "aqlm", "quip_params",
)  # fmt: skip
"""Keys of a configuration that say how its weights are quantized: transformers'; compressed-tensors' until 0.9; MLX's;
others of programs' own."""
SETTINGS_BESIDE = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quantization_config.json": "auto-round",
}
"""File with the settings of a quantized checkpoint, where `config.json` has none -> the method of the program that
writes it."""
LEFT_OUT = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "exclude")
"""Keys of `quantization_config` for the modules that are left in 16 bits: compressed-tensors' and ModelOpt's;
transformers', and an alias that it takes; ModelOpt's in a file of its own; Quark's."""
_IN_16_BITS: Storage = "nf4"
"""Storage that `model.base: auto` stands for, unless the checkpoint's own format can be kept."""
_CHANGES_WEIGHTS = re.compile(
    "transform|rotat|hadamard|sparsity|adapter|scale_semantics|pack_dtype|is_marlin|moe_quant"
)
"""Settings by which a weight is not what its code and its scale say, codes are packed otherwise, or experts are in
another format (MiniMax-M3.1's)."""
_OF_ACTIVATIONS = ("activation_scheme", "activation_scale_ub", "input_activations", "output_activations", "quant_algo")
"""Settings of quantized activations: transformers', compressed-tensors' and ModelOpt's."""
SAVE_AGAIN = (
    "if save_pretrained wrote this from a model loaded with dequantize=True, save it again with "
    "save_original_format=False"
)
"""What to do about a checkpoint that transformers left half packed."""


@dataclass(frozen=True)
class SourceQuantization:
    """The format in which the weights of a model are published.

    Attributes:
        method: transformers' name of the quantization method, `moetune` for a quantized base, or empty for 16 bits.
        base: the value of `model.base` that keeps the published format; None if no value does. It is a section for
            some quantized bases.
        double_quant: whether NF4 scales are stored in 8 bits; meaningful only if `base` is nf4.
        gate_up_apart: whether an expert's gate and up projections are quantized separately.
        is_read: whether moetune can read this format.
        only: patterns of the paths of the only modules that are published quantized; none for all.
        left_out: patterns of the paths of modules that are published in 16 bits, beside others that are quantized: with
            wildcards, or regular expressions after `re:`.
        has_activations: whether it is published for activations that are quantized too, which those of training are
            not.
        among: the format in which the others are published; None for `base`.
        told: if the format is not read, the settings that decide it, for messages.
    """

    method: str = ""
    base: ResolvedBase | None = None
    double_quant: bool = True
    gate_up_apart: bool = False
    is_read: bool = True
    only: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    has_activations: bool = False
    among: Storage | None = None
    told: str = field(default="", compare=False)

    def settle(self, config: ModelConfig) -> ModelConfig:
        """Return the `model:` section with `base: auto` replaced by a storage, and `double_quant` by the checkpoint's.

        Another `base`, and a `double_quant` that the user set, stay as they are.
        """
        own, scales, is_auto = self.base or _IN_16_BITS, config.double_quant, config.default_base == "auto"
        base: Any = own if config.base == "auto" else config.base
        if isinstance(config.base, BaseConfig):
            default = getattr(own, "default", own) if is_auto else config.base.default
            base = resolved(ResolvedBaseConfig, config.base, default=default)
        if is_auto and self.base is not None and "double_quant" not in config.model_fields_set:
            scales = self.double_quant  # run/validation.py refuses a contradiction to one that is set
        return config.model_copy(update={"base": base, "double_quant": scales})

    def keeps_gate_up_apart(self, config: ModelConfig) -> bool:
        """Return whether experts keep, with the `model:` section `config`, a published format in which gate and up are
        quantized separately."""
        alike = config.double_quant == self.double_quant or "nf4" not in config.storages
        return self.gate_up_apart and alike and (isinstance(self.base, BaseConfig) or self.base in config.storages)

    def leaves_out(self, storage: Storage, *paths: str) -> bool:
        """Return whether a `storage` of the module at `paths`, as model and checkpoints name it, keeps the published
        format, in which it is in 16 bits."""
        if storage != (self.among or self.base):
            return False
        is_in = not self.only or any(_names(*pair) for pair in product(self.only, paths))
        return not is_in or any(_names(*pair) for pair in product(self.left_out, paths))

    def experts_as_published(
        self, config: ResolvedModelConfig, experts: Mapping[int, list[str]]
    ) -> ResolvedModelConfig:
        """Return the `model:` section with bf16 for the experts of the layers that are published in 16 bits, unless it
        has another format for them than the published one.

        `experts` maps a layer to the paths of an expert's matrices. Linear layers are left out by `leaves_out`.
        """
        base: Any = config.base
        if not isinstance(base, BaseConfig):
            base = ResolvedBaseConfig(default=base)
        left = [
            layer
            for layer, paths in experts.items()
            if not isinstance(base.layers.get(layer), str)
            and all(self.leaves_out(config.storage_of("experts", layer), path) for path in paths)
        ]
        if not left:
            return config
        change: dict[str, Any] = {"parts": {**base.parts, "experts": "bf16"}}
        if len(left) < len(experts):
            change = {"layers": base.layers | {n: {**base.layers.get(n, {}), "experts": "bf16"} for n in left}}
        return config.model_copy(update={"base": resolved(ResolvedBaseConfig, base, **change)})


def _names(pattern: str, path: str) -> bool:
    """Return whether a pattern of modules to leave in 16 bits names the module at `path`, or one around it.

    It is a regular expression after `re:`, as compressed-tensors has them; else the path's beginning, with wildcards
    (ModelOpt) or as a regular expression, or its end (transformers).
    """
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), path) is not None
    if fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*") or path.endswith(pattern):
        return True
    with suppress(re.error):
        return re.match(rf"(?:{pattern})(?:\.|$)", path) is not None
    return False


def left_out(settings: Settings) -> tuple[str, ...]:
    """Return the patterns (`SourceQuantization.left_out`) under any key that programs have for them; raise `UserError`
    if they are no list of strings, or one is no regular expression after `re:`."""
    return tuple(pattern for key in LEFT_OUT for pattern in patterns(key, settings.get(key)))


def patterns(key: str, names: Any) -> tuple[str, ...]:
    """Return the patterns of modules under a key of settings, none for None; raise `UserError` as `left_out`."""
    if not isinstance(names, list | tuple | None) or not all(isinstance(name, str) for name in names or ()):
        raise invalid(key, names, "give a list of names")
    for name in names or ():
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except (re.error, OverflowError, RecursionError) as error:
            raise invalid(key, name, str(error)) from None
    return tuple(names or ())


def objects(settings: Settings, key: str) -> dict[str, Settings]:
    """Return the object of objects under a key of settings, empty if there is none; raise `UserError` for all else."""
    value = settings.get(key) or {}
    if not isinstance(value, Mapping) or not all(isinstance(part, Mapping) for part in value.values()):
        raise invalid(key, value, "give an object of objects")
    return dict(value)


@dataclass(frozen=True)
class Scheme:
    """How compressed-tensors stores all weights that it quantized.

    Attributes:
        format: name of the layout.
        kind: number of bits, `int` or `float`, and what shares a scale.
        weights: all settings of weights.
        only: patterns of the only modules that are quantized; none for all linear layers.
    """

    format: str
    kind: tuple[Any, Any, Any]
    weights: Settings
    only: tuple[str, ...]


def scheme_of(settings: Settings) -> Scheme | None:
    """Return the scheme of compressed-tensors' settings; None if they have none, or several that differ.

    Raises `UserError` if settings are of the wrong type.
    """
    schemes: list[Scheme] = []
    for group in objects(settings, "config_groups").values():
        if group.get("weights") is None and group.get("input_activations"):
            continue  # of attention, which has none
        if not isinstance(weights := group.get("weights"), Mapping):
            raise invalid("config_groups", group, "give the settings of weights")
        kind = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
        format = group.get("format") or settings.get("format")
        schemes.append(Scheme(str(format), kind, weights, patterns("config_groups.targets", group.get("targets"))))
    sizes = ("group_size", "block_structure", "actorder", "symmetric")
    if len({str((scheme.format, scheme.kind, *map(scheme.weights.get, sizes))) for scheme in schemes}) != 1:
        return None
    only = tuple(pattern for scheme in schemes for pattern in scheme.only)
    return replace(schemes[0], only=() if "Linear" in only else only)


def changes_weights(settings: Settings) -> str | None:
    """Return the name of a setting, at whatever depth, by which weights are not what codes and scales say: a rotation,
    left-out weights, scales that are reciprocals, words of other widths. None if there is none."""
    for key, value in settings.items():
        inner = value if isinstance(value, Mapping) else {}
        if inner.get("format") == "dense" and inner.get("sparsity_structure") in (None, "unstructured", "0:0"):
            continue
        if _CHANGES_WEIGHTS.search(key) and value and value != "int32":
            return key
        if inside := changes_weights(inner):
            return inside
    return None


def has_activations(settings: Settings) -> bool:
    """Return whether settings say, at whatever depth, that activations are quantized."""
    if settings.get("act_bits", 16) != 16 or any(
        settings.get(key) and not re.search("A16|_WO$", str(settings[key]), re.IGNORECASE) for key in _OF_ACTIVATIONS
    ):
        return True
    return any(isinstance(value, Mapping) and has_activations(value) for value in settings.values())


def sections_with_settings(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the section of a configuration, and each section in it, that says how its weights are quantized.

    `config` is transformers' object, or the content of a `config.json`. Its settings are those under the section's keys
    `SETTINGS`.
    """
    section = config if isinstance(config, dict) else vars(config)
    if any(section.get(key) is not None for key in SETTINGS):
        yield section
    for key, value in list(section.items()):
        if key not in SETTINGS and isinstance(value, dict | PretrainedConfig):
            yield from sections_with_settings(value)


def remove_settings(config: Any) -> None:
    """Remove from a configuration, as `sections_with_settings` takes it, all that says how weights are quantized."""
    for section in sections_with_settings(config):
        for key in SETTINGS:
            section.pop(key, None)


def settings_beside(folder: Path) -> dict[str, Any]:
    """Return the settings of a quantized checkpoint from a file beside its `config.json`; none if there is no file.

    Raises `UserError` if the file is damaged.
    """
    for name, method in SETTINGS_BESIDE.items():
        if (folder / name).is_file():
            own = read_json(folder / name, dict[str, Any])
            inner = own.get("quantization", own)
            if not isinstance(inner, dict):
                raise UserError(f"{str(folder / name)!r}: quantization {shown(inner)} is not valid: give an object")
            return {"quant_method": method} | inner
    return {}


def settings_in(folder: Path) -> Settings:
    """Return the settings of a quantized checkpoint; raise `UserError` if they are damaged or there are none."""
    file = folder / "config.json"
    return _settings_in(folder, file.stat().st_mtime_ns if file.is_file() else 0)


@lru_cache(maxsize=1)  # asked for by each tensor
def _settings_in(folder: Path, _changed: int) -> Settings:
    for section in sections_with_settings(read_json(folder / "config.json", dict[str, Any])):
        for key in SETTINGS:
            if isinstance(section.get(key), dict):
                return dict(section[key])
    if beside := settings_beside(folder):
        return beside
    raise UserError(
        f"{str(folder / 'config.json')!r} does not say how the weights are quantized (quantization_config); "
        + SAVE_AGAIN
    )


def invalid(key: str, value: object, reason: str) -> UserError:
    return UserError(f"config.json: quantization_config.{key} {shown(value)} is not valid: {reason}")
