"""`SourceQuantization`: the format in which a checkpoint is published, which decides `model.base: auto`."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from moetune.config.schema import ModelConfig, Storage
from moetune.errors import UserError, shown

Settings = Mapping[str, Any]
"""The `quantization_config` of a checkpoint."""
LEFT_OUT = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "exclude")
"""Keys of `quantization_config` for the modules that are left in 16 bits: compressed-tensors' and ModelOpt's;
transformers', and an alias that it takes; ModelOpt's in a file of its own; Quark's."""
_IN_16_BITS: Storage = "nf4"
"""Storage that `model.base: auto` stands for, unless the checkpoint's own format can be kept."""


@dataclass(frozen=True)
class SourceQuantization:
    """The format in which the weights of a model are published.

    Attributes:
        method: transformers' name of the quantization method, `moetune` for a quantized base, or empty for 16 bits.
        base: the value of `model.base` that keeps the published format; None if no value does.
        double_quant: whether NF4 scales are stored in 8 bits; meaningful only if `base` is nf4.
        gate_up_apart: whether an expert's gate and up projections are quantized separately.
        is_read: whether moetune can read this format.
        left_out: patterns of the paths of modules that are published in 16 bits, beside others that are quantized: with
            wildcards, or regular expressions after `re:`.
    """

    method: str = ""
    base: Storage | None = None
    double_quant: bool = True
    gate_up_apart: bool = False
    is_read: bool = True
    left_out: tuple[str, ...] = ()

    def settle(self, config: ModelConfig) -> ModelConfig:
        """Return the `model:` section with `base: auto` replaced by a storage, and `double_quant` by the checkpoint's.

        A section with another `base`, and a `double_quant` that the user set, stay as they are.
        """
        if config.base != "auto":
            return config
        given = "double_quant" in config.model_fields_set  # run/validation.py refuses a contradiction
        scales = config.double_quant if given or self.base is None else self.double_quant
        return config.model_copy(update={"base": self.base or _IN_16_BITS, "double_quant": scales})

    def keeps_gate_up_apart(self, config: ModelConfig) -> bool:
        """Return whether experts keep, with the `model:` section `config`, a published format in which gate and up are
        quantized separately."""
        alike = config.double_quant == self.double_quant or config.base != "nf4"
        return self.gate_up_apart and config.base == self.base and alike

    def leaves_out(self, path: str, config: ModelConfig) -> bool:
        """Return whether the `model:` section `config` keeps the published format, in which the module at `path` is in
        16 bits."""
        return config.base == self.base and any(_names(pattern, path) for pattern in self.left_out)


def _names(pattern: str, path: str) -> bool:
    """Return whether a pattern of modules to leave in 16 bits names the module at `path`, or one around it.

    It is a regular expression after `re:`, as compressed-tensors has them; else the path's beginning, with wildcards
    (ModelOpt) or as a regular expression, or its end (transformers).
    """
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), path) is not None
    if fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*") or path.endswith(f".{pattern}"):
        return True
    with suppress(re.error):
        return re.match(rf"(?:{pattern})(?:\.|$)", path) is not None
    return False


def left_out(settings: Settings) -> tuple[str, ...]:
    """Return the patterns (`SourceQuantization.left_out`) under any key that programs have for them; raise `UserError`
    if they are no list of strings, or one is no regular expression after `re:`."""
    patterns: list[str] = []
    for key in LEFT_OUT:
        names = settings.get(key) or ()
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise invalid(key, names, "give a list of names")
        for name in names:
            try:
                re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
            except (re.error, OverflowError, RecursionError) as error:
                raise invalid(key, name, str(error)) from None
        patterns += names
    return tuple(patterns)


def invalid(key: str, value: object, reason: str) -> UserError:
    return UserError(f"config.json: quantization_config.{key} {shown(value)} is not valid: {reason}")
