"""How a model is published: in 16 bits, or quantized; and so what `model.base: auto` is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator
from transformers import PretrainedConfig

from moetune.config.schema import ModelConfig, QuantizedDtype, Storage
from moetune.documents import Amount, read_json
from moetune.errors import UserError
from moetune.files import check_path
from moetune.models.hub.fingerprint import Base, Fingerprint
from moetune.models.hub.snapshot import QUANTIZED_MANIFEST
from moetune.models.hub.tensor_files import is_name_of_weights

BEGUN = ".packed.begun.json"
"""In a folder that `moetune quantize` has not finished."""
_IN_16_BITS: Storage = "nf4"
"""What `auto` is for models that are not kept as they are published."""


@dataclass(frozen=True)
class SourceQuantization:
    """How the weights of a model are stored where it is published.

    Attributes:
        method: transformers' name of the quantization; empty for none.
        base: the storage that keeps them as they are published; None where there is none.
        double_quant: where that is NF4.
        gate_up_apart: whether an expert's gate and up are quantized each by itself.
        is_read: whether they can be read at all.
    """

    method: str = ""
    base: Storage | None = None
    double_quant: bool = True
    gate_up_apart: bool = False
    is_read: bool = True

    def settle(self, config: ModelConfig) -> ModelConfig:
        """Spell out `base: auto`."""
        if config.base != "auto":
            return config
        given = "double_quant" in config.model_fields_set  # if it is another, this is refused
        scales = config.double_quant if given or self.base is None else self.double_quant
        return config.model_copy(update={"base": self.base or _IN_16_BITS, "double_quant": scales})

    def keeps_gate_up_apart(self, config: ModelConfig) -> bool:
        """Whether gate and up stay quantized each by itself, because the weights are kept as they are published."""
        return self.gate_up_apart and (config.base, config.double_quant) == (self.base, self.double_quant)


def _check_name(name: str) -> str:
    if not is_name_of_weights(name):
        raise ValueError(f"{name} is no file of the folder")
    return name


@dataclass(frozen=True)
class QuantizedFile:
    """One file of a quantized base."""

    bytes: Amount
    sha256: str


@dataclass(frozen=True)
class QuantizedManifest:
    """`packed.json`, which `moetune quantize` writes.

    Attributes:
        source: the folder of the checkpoint that was quantized.
        fingerprint: of that checkpoint.
    """

    base: QuantizedDtype
    double_quant: bool
    source: Annotated[Path, BeforeValidator(lambda text: str(check_path(text)) if isinstance(text, str) else text)]
    fingerprint: Fingerprint
    files: dict[Annotated[str, AfterValidator(_check_name)], QuantizedFile]
    gate_up_apart: bool = False

    @property
    def original(self) -> Base:
        """The checkpoint that was quantized."""
        return Base(self.source.name, self.fingerprint)

    @property
    def quantization(self) -> SourceQuantization:
        return SourceQuantization("moetune", self.base, self.double_quant, self.gate_up_apart)


def read_quantized_manifest(folder: Path) -> QuantizedManifest | None:
    """Read the manifest of a quantized base; None for any other folder.

    Raises:
        UserError: it is damaged or of an earlier version, or the base was begun and not finished.
    """
    if (folder / QUANTIZED_MANIFEST).is_file():  # written last; a kill may have left the other one
        remedy = "write it again with moetune quantize"
        return read_json(folder / QUANTIZED_MANIFEST, QuantizedManifest, remedy=remedy)
    if (folder / BEGUN).is_file():
        raise UserError(f"{str(folder)!r} is not a complete quantized base; run moetune quantize again to finish it")
    return None


def quantization_of(config: PretrainedConfig) -> SourceQuantization:
    """Read how a checkpoint is published from its configuration."""
    raw: Any = getattr(config, "quantization_config", None)
    if raw is None:
        return SourceQuantization()
    settings: Mapping[str, Any] = raw if isinstance(raw, Mapping) else raw.to_dict()
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    match method:
        case "mxfp4":
            return SourceQuantization(method, "mxfp4")
        case "fp8" if settings.get("weight_block_size"):
            return SourceQuantization(method)
        case "bitsandbytes" if settings.get("load_in_4bit", settings.get("_load_in_4bit")):
            is_nf4 = settings.get("bnb_4bit_quant_type") == "nf4"
            double_quant = bool(settings.get("bnb_4bit_use_double_quant"))
            return SourceQuantization(method, "nf4" if is_nf4 else None, double_quant, gate_up_apart=is_nf4)
    return SourceQuantization(method, is_read=False)
