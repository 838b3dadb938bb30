"""`FORMATS`: every format of frozen weights by name; a new one is a file of this room, and a place here."""

from typing import Protocol

from moetune.config.schema import Storage
from moetune.formats.base import Format
from moetune.formats.fp8 import Fp8
from moetune.formats.int8 import Int8
from moetune.formats.mxfp4 import Mxfp4
from moetune.formats.nf4 import Nf4
from moetune.formats.nvfp4 import Nvfp4
from moetune.formats.plain import Bf16, Fp32

FORMATS: dict[Storage, Format] = {
    format.name: format for format in (Nf4(), Int8(), Fp8(), Nvfp4(), Mxfp4(), Bf16(), Fp32())
}
"""Value of `model.base` -> the format; of NF4 that with double quantization."""


class _Config(Protocol):
    @property
    def base(self) -> Storage: ...

    @property
    def double_quant(self) -> bool: ...


def format_of(config: _Config) -> Format:
    """Return the format that a resolved `model:` section sets."""
    return FORMATS[config.base].with_scales(config.double_quant)
