"""`QuantizedManifest`: the manifest of a quantized base, which `moetune quantize` writes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from moetune.config.resolved import ResolvedBaseConfig
from moetune.config.schema import QuantizedDtype
from moetune.files import check_path
from moetune.formats.source_quantization import SourceQuantization
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
        base: the value of `model.base` that the weights are stored in, a section where there are several.
        double_quant: whether NF4 scales are stored in 8 bits; meaningful only if `base` is nf4.
        gate_up_apart: whether an expert's gate and up projections are quantized separately.
        source: folder of the original checkpoint.
        fingerprint: fingerprint of the original checkpoint.
        files: name of each safetensors file of the quantized base -> its size and digest.
    """

    base: QuantizedDtype | ResolvedBaseConfig
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
