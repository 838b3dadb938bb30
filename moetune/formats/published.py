"""`SourceQuantization`: the format in which a checkpoint is published, which decides `model.base: auto`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from moetune.config.schema import ModelConfig, Storage
from moetune.errors import UserError, shown

Settings = Mapping[str, Any]
"""The `quantization_config` of a checkpoint."""
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
        return config.base == self.base and any(
            re.match(pattern.removeprefix("re:"), path)
            if pattern.startswith("re:")
            else fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*") or path.endswith(f".{pattern}")
            for pattern in self.left_out
        )


def patterns_of(settings: Settings, key: str) -> tuple[str, ...]:
    """Return the patterns (`SourceQuantization.left_out`) under a key of `quantization_config`, none if it is missing;
    raise `UserError` if they are no list of strings, or one is no regular expression after `re:`."""
    found = settings.get(key) or ()
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        raise invalid(key, found, "give a list of names")
    for one in found:
        try:
            re.compile(one.removeprefix("re:") if one.startswith("re:") else "")
        except (re.error, OverflowError, RecursionError) as error:
            raise invalid(key, one, str(error)) from None
    return tuple(found)


def invalid(key: str, value: object, reason: str) -> UserError:
    return UserError(f"config.json: quantization_config.{key} {shown(value)} is not valid: {reason}")
