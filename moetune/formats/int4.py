"""INT4: codes with a scale a group; settings of GPTQ, AWQ and compressed-tensors.

compressed-tensors, GPTQ, AutoRound and AWQ store the same numbers in other orders (`int4_layouts.py`). In memory they
are alike: a weight is (code - zero) · scale.
"""

import re
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from moetune.config.schema import Storage
from moetune.formats.base import Format, Rows, Sizes, compressed_tensors
from moetune.formats.int4_layouts import Awq, Gptq, PackQuantized, format_of_gptq
from moetune.formats.int4_values import dequantize_int4, group_of, packed, unpacked
from moetune.formats.source_quantization import Settings, SourceQuantization, left_out, objects, patterns, scheme_of
from moetune.kernels import AT_ONCE

ZERO, LARGEST = 8, 15  # zero point of a symmetric group; largest code
_EPS = torch.finfo(torch.bfloat16).eps  # scale of a group of zeros, as compressed-tensors has it


class Int4(Format):
    """4-bit numbers with a scale in 16 bits and a zero point for each group; quantized as by compressed-tensors.

    Attributes:
        group: columns of a group; 0 for all columns of a row.
        ordered: whether the columns of a group are anywhere in the row (act-order).
    """

    layouts = (PackQuantized, Gptq, Awq)
    is_read_apart = True
    unpacked_by = 4  # AWQ's codes, of which each takes a byte while they are transposed

    def __init__(self, group: int, ordered: bool = False) -> None:
        self.group, self.ordered = group, ordered
        self.name = cast(Storage, f"int4-{f'g{group}' if group else 'row'}{'-order' if ordered else ''}")
        self.bits, self.into_multiple = 4 + 20 / (group or 4096), group or 1

    def groups(self, columns: int) -> int:
        """Return the number of groups of a row."""
        return -(-columns // (self.group or columns))

    def buffers(self, count: int, shape: tuple[int, int]) -> Sizes:
        rows, columns = shape
        groups = self.groups(columns)
        sizes: Sizes = {
            "data": (torch.uint8, (count, rows, 4 * -(-columns // 8))),
            "scales": (torch.int16, (count, rows, groups)),
            "is_half": (torch.uint8, (count,)),
            "zeros": (torch.uint8, (count, rows, -(-groups // 2))),
        }
        return sizes | ({"order": (torch.int16, (count, columns))} if self.ordered else {})

    def quantize(self, weight: Tensor, row: Rows, largest: Tensor | None = None, keep: bool = False) -> None:
        """Quantize as `Format.quantize` says: symmetrically, by the formulas of compressed-tensors.

        The scale of a group is its largest magnitude / 7.5 in bfloat16. With `keep`, scale, zero point and the dtype of
        scales stay.
        """
        columns = weight.shape[1]
        if not keep:
            row["is_half"].zero_()
            if self.ordered:
                row["order"].copy_(group_of(columns, self.group))
        groups = row["order"].long() if self.ordered else group_of(columns, self.group, weight.device).long()
        count, high = self.groups(columns), max(1, AT_ONCE // columns)
        half = row["is_half"].bool()  # not asked on the host, so that fake tensors take the same way
        for first in range(0, len(weight), high):
            part = weight[first : first + high].float()
            where = groups.expand_as(part)

            def extreme(values: Tensor, which: str, where: Tensor = where) -> Tensor:
                of_groups = values.new_zeros(len(values), count)
                return of_groups.scatter_reduce(1, where, values, which, include_self=which == "amax")

            scale = _values(_bits(extreme(part.abs(), "amax") / (LARGEST / 2), half), half)
            scale = scale.where(scale != 0, _EPS)
            zero = torch.full_like(scale, ZERO)
            stored, of_zeros = row["scales"][first : first + high], row["zeros"][first : first + high]
            if keep:
                before, scale_before = unpacked(of_zeros, count).float(), _values(stored, half)
                scaled = part / scale_before[:, groups] + before[:, groups]
                fits = (extreme(scaled, "amin") >= -0.5) & (extreme(scaled, "amax") <= LARGEST + 0.5)
                scale, zero = scale_before.where(fits, scale), before.where(fits, zero)
            codes = (part / scale[:, groups]).add_(zero[:, groups]).round_().clamp_(0, LARGEST)
            # padding is 0, as compressed-tensors and gptqmodel have it
            codes = pad(codes.to(torch.uint8), (0, -columns % 8))
            row["data"][first : first + high].copy_(packed(codes))
            stored.copy_(_bits(scale, half))
            of_zeros.copy_(packed(zero.to(torch.uint8)))

    def dequantize(self, stored: Rows, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        parts = (stored[name] for name in ("data", "scales", "is_half", "zeros"))
        weights: Tensor = dequantize_int4(*parts, stored.get("order"), self.group, shape[1], dtype)
        return weights

    def published(self, method: str, settings: Settings) -> SourceQuantization | None:
        kinds = {"compressed-tensors": _pack_quantized, "gptq": _gptq, "awq": _awq, "auto-round": _auto_round}
        kind = kinds[method](settings) if method in kinds else None
        if kind is None or kind[0] != self.name:
            return None
        skipped = (*left_out(settings), *kind[2])
        return SourceQuantization(method, self.name, gate_up_apart=True, left_out=skipped, only=kind[1])

    def layout(self, *shape: int) -> Sizes:
        """compressed-tensors': codes, scales and the shape of the matrix."""
        rows, columns = shape
        return {
            "packed": (torch.int32, (rows, -(-columns // 8))),
            "scale": (torch.bfloat16, (rows, self.groups(columns))),
            "shape": (torch.int64, (2,)),
        }

    def constants(self, *shape: int) -> dict[str, Tensor]:
        return {"shape": torch.tensor(shape)}

    def settings(self, others: list[str]) -> dict[str, Any]:
        groups = {"strategy": "group" if self.group else "channel", "group_size": self.group or None}
        return compressed_tensors("pack-quantized", others, num_bits=4, type="int", **groups)


def _bits(scales: Tensor, half: Tensor) -> Tensor:
    """Return the bits of scales, rounded to float16 where `half` is True and else to bfloat16, as int16."""
    return torch.where(half, scales.half().view(torch.int16), scales.bfloat16().view(torch.int16))


def _values(bits: Tensor, half: Tensor) -> Tensor:
    """Return in float32 the scales that have these bits."""
    return torch.where(half, bits.view(torch.float16), bits.view(torch.bfloat16)).float()


# --- Settings of checkpoints ----------------------------------------------------------------------------------------

_Kind = tuple[str, tuple[str, ...], tuple[str, ...]]
"""Value of `model.base` that keeps a checkpoint; patterns of what alone is quantized, none for all, and of what not."""


def _name(size: Any, ordered: bool = False) -> str:
    """Return the value of `model.base` for groups of `size` columns, -1 or None for one group a row."""
    return f"int4-{'row' if size in (-1, None) else f'g{size!r}'}{'-order' if ordered else ''}"


def _pack_quantized(settings: Settings) -> _Kind | None:
    scheme = scheme_of(settings)
    if (
        scheme is None
        or scheme.format != "pack-quantized"
        or scheme.weights.get("actorder") in ("group", "dynamic", True)
    ):
        return None
    if scheme.kind not in ((4, "int", "group"), (4, "int", "channel")):
        return None
    size = scheme.weights.get("group_size") if scheme.kind[2] == "group" else -1
    return _name(size), scheme.only, ()


def _gptq(settings: Settings) -> _Kind | None:
    if settings.get("bits") != 4 or str(format_of_gptq(settings)) not in ("gptq", "gptq_v2"):
        return None
    dynamic = objects(settings, "dynamic")
    if any(not rule.startswith("-:") for rule in dynamic):  # layers in other numbers of bits
        return None
    key = "modules_in_block_to_quantize"
    blocks = settings.get(key) or ()
    blocks = blocks if isinstance(blocks, list | tuple) else [blocks]
    only = [name for block in blocks for name in patterns(key, [block] if isinstance(block, str) else block)]
    skipped = [f"re:{rule.removeprefix('-:')}" for rule in dynamic]
    size = settings.get("group_size")
    is_ordered = bool(settings.get("desc_act")) and size not in (-1, None)
    return _name(size, is_ordered), tuple(only), patterns("dynamic", skipped)


def _awq(settings: Settings) -> _Kind | None:
    kinds = {str(settings.get(key) or "gemm").lower() for key in ("version", "format")}
    if settings.get("bits", settings.get("w_bit")) != 4 or kinds != {"gemm"} or settings.get("backend") == "llm-awq":
        return None
    # AutoAWQ leaves out what has one of the names anywhere in its path
    anywhere = [
        f"re:.*{re.escape(name)}" for name in patterns("modules_to_not_convert", settings.get("modules_to_not_convert"))
    ]
    return _name(settings.get("group_size", settings.get("q_group_size"))), (), tuple(anywhere)


def _auto_round(settings: Settings) -> _Kind | None:
    if settings.get("bits") != 4 or settings.get("data_type", "int") != "int":
        return None
    in_16_bits = []
    for name, layer in objects(settings, "extra_config").items():
        if layer.get("bits") in (16, 32):
            in_16_bits.append(f"re:{name}" if re.search(r"[*\\^$|]", name) else name)
        elif any(layer.get(key, settings.get(key)) != settings.get(key) for key in ("bits", "group_size", "data_type")):
            return None
    return _name(settings.get("group_size")), (), patterns("extra_config", in_16_bits)


FORMATS_OF_INT4 = (*(Int4(group) for group in (32, 64, 128, 0)), *(Int4(group, True) for group in (32, 64, 128)))
