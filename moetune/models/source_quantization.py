"""The storage format of a published checkpoint (16 bits, NF4, MXFP4, NVFP4, FP8), which decides `model.base: auto`.

Only the configuration and the manifest are read here; hub/dequantize.py reads the quantized tensors.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator
from transformers import PretrainedConfig

from moetune.config.schema import FP8_BLOCK, ModelConfig, QuantizedDtype, Storage
from moetune.errors import UserError, shown
from moetune.files import check_path
from moetune.json_files import Amount, read_json
from moetune.models.hub.fingerprint import Base, Fingerprint
from moetune.models.hub.snapshot import QUANTIZED_MANIFEST
from moetune.tensor_files import is_name_of_weights

REST = "rest.safetensors"
"""Name of the file of a quantized base with all tensors other than experts, under the names of transformers' model."""
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


def _check_name(name: str) -> str:
    if not is_name_of_weights(name):
        raise ValueError(f"{name} is no file of the folder")
    return name


@dataclass(frozen=True)
class QuantizedFile:
    """Size and hexadecimal SHA-256 of one file of a quantized base."""

    bytes: Amount
    sha256: str


@dataclass(frozen=True)
class QuantizedManifest:
    """The manifest `packed.json` of a quantized base, a checkpoint that `moetune quantize` quantized.

    Attributes:
        base: the value of `model.base` that the weights are stored in.
        double_quant: whether NF4 scales are stored in 8 bits; meaningful only if `base` is nf4.
        gate_up_apart: whether an expert's gate and up projections are quantized separately.
        source: folder of the original checkpoint.
        fingerprint: fingerprint of the original checkpoint.
        files: name of each safetensors file of the quantized base -> its size and digest.
    """

    base: QuantizedDtype
    double_quant: bool
    source: Annotated[Path, BeforeValidator(lambda text: str(check_path(text)) if isinstance(text, str) else text)]
    fingerprint: Fingerprint
    files: dict[Annotated[str, AfterValidator(_check_name)], QuantizedFile]
    gate_up_apart: bool = False

    @property
    def original(self) -> Base:
        """Name and fingerprint of the original checkpoint."""
        return Base(self.source.name, self.fingerprint)

    @property
    def quantization(self) -> SourceQuantization:
        """The format of the quantized base."""
        return SourceQuantization("moetune", self.base, self.double_quant, self.gate_up_apart)


def read_quantized_manifest(folder: Path) -> QuantizedManifest | None:
    """Return the manifest of a quantized base; None for any other folder.

    Raises:
        UserError: the manifest is damaged or of an earlier version.
    """
    if not (folder / QUANTIZED_MANIFEST).is_file():
        return None
    remedy = "write it again with moetune quantize"
    return read_json(folder / QUANTIZED_MANIFEST, QuantizedManifest, remedy=remedy)


def quantization_of(config: PretrainedConfig) -> SourceQuantization:
    """Return the format of a checkpoint from the `quantization_config` in its configuration.

    ModelOpt's settings may also be in a file of their own (`models/source.py`).

    Raises:
        UserError: a setting that is read has a value of the wrong type, or a pattern is no regular expression.
    """
    raw: Any = getattr(config, "quantization_config", None)
    if raw is None:
        return SourceQuantization()
    if not isinstance(raw, Mapping) and not hasattr(raw, "to_dict"):
        raise UserError(f"config.json: quantization_config {shown(raw)} is not valid: give an object")
    settings: Mapping[str, Any] = raw if isinstance(raw, Mapping) else raw.to_dict()
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    match method:
        case "mxfp4":
            return SourceQuantization(method, "mxfp4")
        case "fp8" if settings.get("weight_block_size"):
            size = settings["weight_block_size"]
            if not isinstance(size, list | tuple) or len(size) != 2 or not all(isinstance(one, int) for one in size):
                raise _invalid("weight_block_size", size, "give two numbers")
            is_kept = [*size] == [FP8_BLOCK, FP8_BLOCK]
            left_out = _patterns(settings, "modules_to_not_convert")
            return SourceQuantization(method, "fp8" if is_kept else None, gate_up_apart=is_kept, left_out=left_out)
        case "modelopt" if settings.get("quant_algo") in ("NVFP4", "W4A16_NVFP4"):
            left_out = _patterns(settings, "ignore") or _patterns(settings, "exclude_modules")
            return SourceQuantization(method, "nvfp4", gate_up_apart=True, left_out=left_out)
        case "compressed-tensors" if settings.get("format") == "nvfp4-pack-quantized":
            left_out = _patterns(settings, "ignore")
            return SourceQuantization(method, "nvfp4", gate_up_apart=True, left_out=left_out)
        case "bitsandbytes" if settings.get("load_in_4bit", settings.get("_load_in_4bit")):
            is_nf4 = settings.get("bnb_4bit_quant_type") == "nf4"
            double_quant = bool(settings.get("bnb_4bit_use_double_quant"))
            return SourceQuantization(method, "nf4" if is_nf4 else None, double_quant, gate_up_apart=is_nf4)
    return SourceQuantization(method, is_read=False)


def _patterns(settings: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the patterns (`SourceQuantization.left_out`) under a key of `quantization_config`, none if it is missing;
    raise `UserError` if they are no list of strings, or one is no regular expression after `re:`."""
    found = settings.get(key) or ()
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        raise _invalid(key, found, "give a list of names")
    for one in found:
        try:
            re.compile(one.removeprefix("re:") if one.startswith("re:") else "")
        except (re.error, OverflowError, RecursionError) as error:
            raise _invalid(key, one, str(error)) from None
    return tuple(found)


def _invalid(key: str, value: object, reason: str) -> UserError:
    return UserError(f"config.json: quantization_config.{key} {shown(value)} is not valid: {reason}")
