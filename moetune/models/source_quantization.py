"""The format in which a checkpoint is published, from its configuration, or from the manifest of a quantized base."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator
from transformers import PretrainedConfig

from moetune.config.schema import QuantizedDtype
from moetune.errors import UserError, shown
from moetune.files import check_path
from moetune.formats.published import SETTINGS, SourceQuantization, sections_with_settings
from moetune.formats.table import FORMATS
from moetune.json_files import Amount, read_json
from moetune.models.hub.fingerprint import Base, Fingerprint
from moetune.models.hub.snapshot import QUANTIZED_MANIFEST
from moetune.tensor_files import is_name_of_weights

REST = "rest.safetensors"
"""Name of the file of a quantized base with all tensors other than experts, under the names of transformers' model."""


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
    """Return the format of a checkpoint from the settings in its configuration, at whatever depth.

    Programs that do not write them there have a file of their own (`SETTINGS_BESIDE`).

    Raises:
        UserError: a setting that is read has a value of the wrong type, or a pattern is no regular expression.
    """
    formats: list[SourceQuantization] = []
    for section in sections_with_settings(config):
        for key in SETTINGS:
            if (raw := section.get(key)) is not None and (how := _quantization(key, raw)) not in formats:
                formats.append(how)
    if len(formats) > 1:
        return SourceQuantization(" and ".join(how.method for how in formats), is_read=False)
    return formats[0] if formats else SourceQuantization()


def _quantization(key: str, raw: Any) -> SourceQuantization:
    """Return the format that the settings under one of the keys `SETTINGS` describe."""
    if not isinstance(raw, Mapping) and not hasattr(raw, "to_dict"):
        raise UserError(f"config.json: {key} {shown(raw)} is not valid: give an object")
    settings: Mapping[str, Any] = raw if isinstance(raw, Mapping) else raw.to_dict()
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    name = f"{key} without quant_method" if method is None else str(getattr(method, "value", method))
    of_formats = (format.published(name, settings) for format in FORMATS.values())
    return next(filter(None, of_formats), SourceQuantization(name, is_read=False))
