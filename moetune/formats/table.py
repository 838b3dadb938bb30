"""`FORMATS`: every format of frozen weights by name; a new one is a file of this room, and a place here."""

from moetune.config.schema import Storage
from moetune.formats.base import Format
from moetune.formats.fp8 import FORMATS_OF_FP8
from moetune.formats.int4 import FORMATS_OF_INT4
from moetune.formats.int8 import Int8
from moetune.formats.mxfp4 import Mxfp4
from moetune.formats.nf4 import Nf4
from moetune.formats.nvfp4 import Nvfp4
from moetune.formats.plain import PLAIN

_FORMATS = (Nf4(), Int8(), *FORMATS_OF_FP8, Nvfp4(), Mxfp4(), *FORMATS_OF_INT4, *PLAIN)
FORMATS: dict[Storage, Format] = {format.name: format for format in _FORMATS}
"""Value of `model.base` -> the format; of NF4 that with double quantization."""


def format_of(storage: Storage, double_quant: bool) -> Format:
    """Return the format that `model.base` and `model.double_quant` set."""
    return Nf4(double_quant) if storage == Nf4.name else FORMATS[storage]
