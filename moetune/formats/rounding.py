"""`Rounding`: a merged weight rounded to a format, by `export --into` and while training for it.

Shapes: a matrix is [R, C] = [out_features, in_features].
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from moetune.config.schema import Into, Storage
from moetune.formats.base import SLACK, Format, Quantized, Rows, largest_of
from moetune.formats.table import FORMATS
from moetune.tensor_files import Stored

_INT4: Storage = "int4-g32"
"""The format that `int4` stands for, unless the base is published in another kind of it."""


@dataclass(frozen=True)
class Rounding:
    """The rounding of weights to a quantized format.

    Attributes:
        format: the format.
        keep: whether the base is published in the format, so that blocks keep its scales (`Format.quantize`).
    """

    format: Format
    keep: bool

    def is_of(self, columns: int) -> bool:
        """Return whether matrices of so many columns are rounded."""
        return self.keep or columns % self.format.into_multiple == 0

    def largest(self, weight: Tensor, of_base: float | Tensor | None = None) -> Tensor | None:
        """Return the magnitude that the scale of a matrix must allow, or of matrices that inference joins; None for
        that of each matrix.

        Args:
            weight: the matrix in float32, or all that are joined.
            of_base: the largest magnitude that all of the joined have in the base, if `weight` is one of them: they
                have one scale as long as none outgrows it.
        """
        if self.keep or not self.format.joins_scales:
            return None
        own = largest_of(weight)
        return own if of_base is None else torch.where(own <= of_base * SLACK, of_base, own)

    def rounded(
        self,
        weights: Iterable[Tensor],
        count: int,
        dtype: torch.dtype,
        *,
        pieces: int = 1,
        stored: Rows | None = None,
        of_base: float | None = None,
    ) -> Tensor:
        """Round `count` matrices of one shape, and return them in `dtype`: [count, R, C].

        Args:
            weights: the matrices in float32; each is freed before the next is asked for.
            pieces: number of equal row blocks of a matrix that are quantized as separate matrices, with one scale
                where inference joins them.
            stored: the base's buffers of these matrices, and its tables; read only with `keep`.
            of_base: as in `largest`.
        """
        rows: dict[str, Tensor] = {}
        tables = self.format.tables()
        numbers = iter(range(count))
        for weight in weights:  # not by `enumerate`, which holds a weight until it has the next
            index = next(numbers)
            shape = len(weight) // pieces, weight.shape[1]
            if not index:
                sizes = self.format.buffers(count * pieces, shape).items()
                rows = {name: torch.empty(size, dtype=kind, device=weight.device) for name, (kind, size) in sizes}
                for name, values in ((stored or {}) if self.keep else tables).items():
                    rows[name].copy_(values)
            largest = self.largest(weight, of_base)
            for number in range(pieces):
                row = {name: of_all[index * pieces + number] for name, of_all in rows.items() if name not in tables}
                self.format.quantize(weight[number * shape[0] :][: shape[0]], row, largest, self.keep)
            del weight, largest
        return self.format.dequantize(rows, shape, dtype).view(count, -1, shape[1])


def rounding_into(into: Into, published: object, tensors: Iterable[Stored] = ()) -> Rounding:
    """Return how a base is rounded to the format `into`: to the kind of it in which the base is published, with the
    base's scales.

    Args:
        published: the value of `model.base` that keeps the base's format; None, or a section, if it is in no one.
        tensors: the tensors of the base, which are all in that format, or else the scales are not kept; none if they
            are not here.
    """
    if not isinstance(published, str) or published.split("-")[0] != into:
        return Rounding(FORMATS[_INT4 if into == "int4" else into], keep=False)
    format, given = FORMATS[cast(Storage, published)], [*tensors]
    own = [tensor for tensor in given if isinstance(tensor, format.layouts)]
    is_in = all(isinstance(tensor, Quantized) and tensor.is_in(format) for tensor in own)
    return Rounding(format, keep=is_in and bool(own or not given))


def joined_name(name: str) -> str:
    """Return a tensor's name, changed to be equal for matrices which vLLM joins: gate and up; queries, keys, values."""
    return re.sub(r"\b(gate|up)_proj\b|\bw[13]\b", "gate_up", re.sub(r"\b[qkv]_proj\b", "qkv", name))
