"""`FORMATS`: the table of all formats; `quantization_of`: that of a published checkpoint."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from moetune.config.schema import Storage
from moetune.errors import UserError, first_of, shown
from moetune.formats.base import Format
from moetune.formats.fp8 import FORMATS_OF_FP8
from moetune.formats.int4 import FORMATS_OF_INT4
from moetune.formats.int8 import Int8
from moetune.formats.mxfp4 import Mxfp4
from moetune.formats.nf4 import Nf4
from moetune.formats.nvfp4 import Nvfp4
from moetune.formats.plain import PLAIN
from moetune.formats.source_quantization import (
    SETTINGS,
    SourceQuantization,
    changes_weights,
    has_activations,
    sections_with_settings,
)

_FORMATS = (Nf4(), Int8(), *FORMATS_OF_FP8, Nvfp4(), Mxfp4(), *FORMATS_OF_INT4, *PLAIN)
FORMATS: dict[Storage, Format] = {format.name: format for format in _FORMATS}
"""Value of `model.base` -> the format; of NF4 that with double quantization."""


_DECIDE = re.compile(r"'(?:\w*bits|\w*type|strategy|\w*group_size|version|\w*format|fmt)': (?!None)[^][{},]+")
"""Settings, as Python prints them, that a refusal of a format names."""


def format_of(storage: Storage, double_quant: bool) -> Format:
    """Return the format that `model.base` and `model.double_quant` set."""
    return Nf4(double_quant) if storage == Nf4.name else FORMATS[storage]


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
    if (setting := changes_weights(settings)) is not None:
        return SourceQuantization(f"{name} with {setting}", is_read=False)
    of_formats = (format.published(name, settings) for format in FORMATS.values())
    unread = " ".join(filter(None, (name, str(settings.get("quant_algo") or ""))))  # ModelOpt's algorithm
    told = ", ".join(first_of([*dict.fromkeys(_DECIDE.findall(str(settings)))]))
    how = next(filter(None, of_formats), SourceQuantization(unread, is_read=False, told=told))
    return replace(how, has_activations=has_activations(settings))
