"""The tensors in which compressed-tensors, GPTQ, AutoRound and AWQ store INT4."""

from abc import abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from moetune.errors import UserError
from moetune.formats.base import Format, Parts, Quantized, Rows, refuse_zeros, require
from moetune.formats.int4_values import dequantize_int4, group_of, packed, unpacked
from moetune.formats.source_quantization import Settings, scheme_of, settings_in

_EIGHT_ONES = 0x11111111  # 1 in each of a word's eight codes
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight weights each code of a word has
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # which code of a word has each of eight weights
_16_BITS = ("F16", "BF16")


class StoredInt4(Quantized):
    """A matrix [R, C] of 4-bit numbers. Rows are computed in float32 and rounded once to `dtype`, that of the scales.

    Attributes:
        SCALES: the part with the scales.
    """

    SCALES: ClassVar[str]

    @property
    @abstractmethod
    def group(self) -> int:
        """Columns of a group."""

    @property
    def order(self) -> Tensor | None:
        """The group of each column, [C] int32, if the columns of a group are anywhere in the row; else None."""
        return None

    @abstractmethod
    def unpack(self, stored: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return codes [R, 4·⌈C / 8⌉] uint8, two per byte; scales [R, G]; and zero points [R, G] uint8, None for 8."""

    def is_in(self, format: Format) -> bool:
        wanted = getattr(format, "group", None)
        is_ordered = getattr(format, "ordered", None)
        return wanted is not None and (wanted or self.shape[1], is_ordered) == (self.group, self.order is not None)

    def as_rows(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        data, scales, zeros = self.unpack(stored)
        zeros = torch.full(scales.shape, 8, dtype=torch.uint8) if zeros is None else zeros
        half = torch.tensor(scales.dtype == torch.float16, dtype=torch.uint8)
        rows = {"data": data, "scales": scales.view(torch.int16), "is_half": half, "zeros": packed(zeros)}
        return rows if self.order is None else rows | {"order": self.order.to(torch.int16)}

    def quantized(self, expert: int = 0) -> dict[str, Tensor]:
        rows, part = super().quantized(expert), self.parts[self.SCALES]
        refuse_zeros(rows["scales"].view(part.torch_dtype), part)
        return rows

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield (first row, row after the last) of a single block: all rows are dequantized together."""
        yield 0, self.num_rows

    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        rows = {name: tensor.to(device)[None] for name, tensor in self.quantized().items()}
        parts = (rows[name] for name in ("data", "scales", "is_half", "zeros"))
        weights: Tensor = dequantize_int4(*parts, rows.get("order"), self.group, self.shape[1], self.torch_dtype)[
            0, start:stop
        ]
        return weights


class PackQuantized(StoredInt4):
    """compressed-tensors' `pack-quantized`: `packed` [R, ⌈C / 8⌉] int32, the first of eight codes in the lowest bits;
    `scale` [R, G]; `shape`, R and C; and unless zero points are all 8, `zero_point` [⌈R / 8⌉, G] int32."""

    PATTERN = r"(.+\.weight)_(packed|scale|zero_point|shape)"
    MAIN = (("_packed",),)
    SCALES = "scale"

    @classmethod
    def opened(cls, parts: Parts) -> Self | None:
        if not parts.keys() >= {"packed", "scale", "shape"}:
            return None
        words, scales, zeros = parts["packed"], parts["scale"], parts.get("zero_point")
        rows, columns = parts["shape"].rows().tolist()
        groups = scales.shape[1] if len(scales.shape) == 2 else 0
        scheme = scheme_of(settings_in(words.file.parent))
        size = scheme and scheme.weights.get("group_size")
        fits = groups > 0 and columns % groups == 0 and scales.shape[0] == rows == words.shape[0]
        fits = fits and (groups == 1 or columns // groups == size)
        fits = fits and (zeros is not None or (scheme is not None and bool(scheme.weights.get("symmetric", True))))
        fits = fits and words.shape == (rows, -(-columns // 8))
        fits = fits and (zeros is None or (zeros.shape, zeros.dtype) == ((-(-rows // 8), groups), "I32"))
        require(fits and words.dtype == "I32" and scales.dtype in _16_BITS, parts)
        return cls(words.file, scales.dtype, (rows, columns), 0, parts)

    @property
    def group(self) -> int:
        return self.shape[1] // self.parts["scale"].shape[1]

    def unpack(self, stored: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        zeros = _from_words(stored["zero_point"].T, self.shape[0]).T if "zero_point" in stored else None
        return _bytes(stored["packed"]), stored["scale"], zeros

    def as_parts(self, rows: Rows) -> dict[str, Tensor]:
        zeros = unpacked(rows["zeros"], rows["scales"].shape[1])
        return {"zero_point": _words(zeros.T).T} if "zero_point" in self.parts else {}


class Gptq(StoredInt4):
    """GPTQ's: `qweight` [⌈C / 8⌉, R] int32, the first of eight codes in the lowest bits; `scales` [G, R]; `qzeros`
    [G, ⌈R / 8⌉] int32, each less by 1 in version 1 of the format; and `g_idx` [C], the group of each column, which
    AutoRound leaves out."""

    PATTERN = r"(.+)\.(qweight|qzeros|scales|g_idx)"
    TAIL = ".weight"
    MAIN = ((".qweight",),)
    SCALES = "scales"

    @classmethod
    def opened(cls, parts: Parts) -> Self | None:
        if not parts.keys() >= {"qweight", "qzeros", "scales"} or not cls._is_mine(parts):
            return None
        words, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
        groups, rows = scales.shape
        columns = cls._columns(parts)
        fits = zeros.shape == (groups, -(-rows // 8)) and words.dtype == zeros.dtype == "I32"
        require(fits and scales.dtype in _16_BITS, parts)
        weight = cls(words.file, scales.dtype, (rows, columns), 0, parts)
        require(groups == -(-columns // weight.group), parts)
        return weight

    @classmethod
    def _is_mine(cls, parts: Parts) -> bool:
        return parts["qweight"].shape == (-(-cls._columns(parts) // 8), parts["scales"].shape[-1])

    @classmethod
    def _columns(cls, parts: Parts) -> int:
        return parts["g_idx"].shape[0] if "g_idx" in parts else 8 * parts["qweight"].shape[0]

    @property
    def group(self) -> int:
        settings = settings_in(self.file.parent)
        size = settings.get("group_size", settings.get("q_group_size"))
        return size if isinstance(size, int) and size > 0 else self.shape[1]

    @cached_property
    def order(self) -> Tensor | None:
        if "g_idx" not in self.parts:
            return None
        groups = self.parts["g_idx"].rows().int()
        part = self.parts["g_idx"]
        if not 0 <= int(groups.min()) <= int(groups.max()) < self.parts["scales"].shape[0]:
            raise UserError(f"{part.name} names groups that have no scale, in {str(part.file)!r}")
        return None if groups.equal(group_of(self.shape[1], self.group)) else groups

    @property
    def _less(self) -> int:
        """What was taken from the zero points of a word's eight codes."""
        settings = settings_in(self.file.parent)
        if settings.get("quant_method") == "auto-round":
            name = str(settings.get("packing_format", "auto_round:auto_gptq"))
            return _EIGHT_ONES if "gptq" in name and "gptqmodel" not in name else 0
        return 0 if format_of_gptq(settings) == "gptq_v2" else _EIGHT_ONES

    def unpack(self, stored: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        zeros = _from_words(stored["qzeros"] + self._less, self.shape[0])
        return _bytes(stored["qweight"].T), stored["scales"].T.contiguous(), zeros.T

    def as_parts(self, rows: Rows) -> dict[str, Tensor]:
        scales = rows["scales"].view(self.parts["scales"].torch_dtype)
        zeros = _words(unpacked(rows["zeros"], scales.shape[1]).T) - self._less
        return {"qweight": rows["data"].view(torch.int32).T, "qzeros": zeros, "scales": scales.T}


class Awq(Gptq):
    """AWQ's GEMM: `qweight` [C, R / 8] int32 and `qzeros` [G, R / 8], eight codes in a word in an order of their own;
    `scales` [G, R]."""

    @classmethod
    def _is_mine(cls, parts: Parts) -> bool:
        return "g_idx" not in parts and 8 * parts["qweight"].shape[1] == parts["scales"].shape[-1]

    @classmethod
    def _columns(cls, parts: Parts) -> int:
        return parts["qweight"].shape[0]

    def unpack(self, stored: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        codes, zeros = (_from_words(stored[name], self.shape[0]) for name in ("qweight", "qzeros"))
        codes, zeros = (part.unflatten(1, (-1, 8))[..., _AWQ_PLACES].flatten(1).T for part in (codes, zeros))
        return _words(codes).view(torch.uint8), stored["scales"].T.contiguous(), zeros

    def as_parts(self, rows: Rows) -> dict[str, Tensor]:
        scales = rows["scales"].view(self.parts["scales"].torch_dtype)
        codes, zeros = unpacked(rows["data"], self.shape[1]), unpacked(rows["zeros"], scales.shape[1])
        words = (_words(part.T.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1)) for part in (codes, zeros))
        return {**dict(zip(("qweight", "qzeros"), words, strict=True)), "scales": scales.T}


def format_of_gptq(settings: Settings) -> Any:
    """Return the version of GPTQ's layout: gptqmodel's key, an earlier one, or version 1."""
    return settings.get("checkpoint_format") or settings.get("format") or "gptq"


def _from_words(words: Tensor, count: int) -> Tensor:
    """Return the first `count` codes [..., count] uint8 of words [..., n] int32, the first in the lowest bits."""
    return unpacked(_bytes(words), count)


def _bytes(words: Tensor) -> Tensor:
    """Return words [..., n] int32 as bytes [..., 4·n] uint8, a view if they are contiguous."""
    return words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)


def _words(codes: Tensor) -> Tensor:
    """Return codes [..., n] uint8 as words [..., ⌈n / 8⌉] int32, the first in the lowest bits."""
    data = packed(pad(codes, (0, -codes.shape[-1] % 8)))
    return data.reshape(-1).view(torch.int32).view(*codes.shape[:-1], -1)
