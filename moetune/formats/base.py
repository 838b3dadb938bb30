"""`Format`: how frozen weights are stored in memory; `Quantized`: a weight that a checkpoint stores so.

A format is a subclass of `Format` in a file of its own, with a subclass of `Quantized` for each layout that checkpoints
have of it, and a place in `table.py`.

Shapes: a matrix is [R, C] = [out_features, in_features].
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from moetune.config.schema import Storage
from moetune.formats.published import SourceQuantization
from moetune.tensor_files import Stored

AT_ONCE = 1 << 22
"""Weights that are scaled in float32 at a time; they take 16 MiB."""
SLACK = 1 + 2**-5
"""Factor by which a block's largest magnitude may exceed the range of a scale that stays: less than half a step."""
Sizes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Name of a tensor -> its dtype and shape."""


@dataclass(frozen=True)
class Quantized(Stored, ABC):
    """A weight that is stored quantized, in several tensors. Rows are dequantized when they are read.

    Attributes:
        NAMES: pattern of the names of its parts: group 1 is the weight's name, group 2 the part.
        MAIN: endings of the names of parts of which one set is always there, whatever other parts are missing.
        STACKS: whether the weight is a stack of all experts of a layer, [E, in, out], and not a matrix.
        file: file of the weight's largest part.
        dtype: dtype of dequantized rows, in safetensors' spelling.
        shape: shape of the dequantized weight.
        offset: not used.
        parts: suffix of the part's tensor name (`scales`, `absmax`, …; empty for the weight's own name) -> the tensor.
    """

    NAMES: ClassVar[re.Pattern[str]]
    MAIN: ClassVar[tuple[tuple[str, ...], ...]] = (("",),)
    STACKS: ClassVar[bool] = False

    parts: Mapping[str, Stored] = field(default_factory=dict, repr=False)

    @classmethod
    @abstractmethod
    def opened(cls, parts: Mapping[str, Stored], folder: Path) -> Self | None:
        """Return the weight that is stored as `parts` in a checkpoint's folder; None if they are of another layout.

        Raises:
            ValueError: dtypes or shapes of the parts do not fit together.
            UserError: config.json lacks what is needed to read them.
        """

    @abstractmethod
    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Return the dequantized rows [start, stop) as a tensor [stop - start, ...] in `dtype` on `device`.

        None for `stop` is the end.
        """

    @abstractmethod
    def quantized(self, expert: int = 0) -> dict[str, Tensor]:
        """Return the stored tensors of the matrix as buffers (`Format.buffers`), if `is_in` the format; of a stack,
        those of one expert."""

    def is_in(self, format: "Format") -> bool:
        """Return whether the stored tensors are buffers of a format."""
        return type(self) in format.layouts

    def round_(self, weight: Tensor, stored: dict[str, Tensor], largest: Tensor | None, keep: bool) -> None:
        """Quantize float32 weights as checkpoints do, into `stored`, the parts as they are in the file.

        Args:
            weight: a whole matrix, or of a stack one expert.
            largest: the largest magnitude that a scale of the whole matrix must allow; by default that of the weights.
            keep: leave the scales that are stored, unless a weight is too large for them.
        """
        raise AssertionError(f"{type(self).__name__} is not written")

    def write(self, rows: Tensor, start: int = 0) -> None:
        """Raise `AssertionError`: quantized weights are read only."""
        raise AssertionError("what is quantized is not written to")


class Format(ABC):
    """A format in which frozen matrices are stored: a value of `model.base`.

    Matrices are stored in buffers with a row for each, and may share tables. A format is stateless.

    Attributes:
        name: the value of `model.base`.
        formula: the bytes of a matrix of n weights, for reports.
        layouts: how checkpoints store it.
        of_linears: whether linear layers are stored in it; else experts only.
        has_own_linear: whether the library that quantizes has a linear layer, which `linear` returns.
        dtype: the dtype of weights that are not quantized; else None.
        read_bits: bits of a weight in a checkpoint that is read in small parts and kept as it is; None if memory while
            loading is that of weights in 16 bits.
        into_multiple: number of columns of which a matrix must have a multiple to be exported in it.
        joins_scales: whether inference needs one largest scale for matrices that it joins.
    """

    name: Storage
    formula: str
    layouts: ClassVar[tuple[type[Quantized], ...]] = ()
    of_linears: ClassVar[bool] = True
    has_own_linear: ClassVar[bool] = False
    dtype: ClassVar[torch.dtype | None] = None
    read_bits: ClassVar[float | None] = None
    into_multiple: ClassVar[int] = 1
    joins_scales: ClassVar[bool] = False

    @property
    def quantizes_linears(self) -> bool:
        """Whether linear layers are quantized in it."""
        return self.of_linears and self.dtype is None

    @property
    def label(self) -> str:
        """The name with what else there is to say, for reports."""
        return self.name

    def with_scales(self, double_quant: bool) -> "Format":
        """Return the format as `model.double_quant` says, which only NF4 has."""
        return self

    # --- In memory --------------------------------------------------------------------------------------------------

    @abstractmethod
    def buffers(self, count: int, shape: tuple[int, int]) -> Sizes:
        """Return the buffers of `count` matrices [R, C], each with a first dimension of `count`."""

    def tables(self) -> dict[str, Tensor]:
        """Return name -> values of the tables that matrices share."""
        return {}

    @abstractmethod
    def quantize(self, weight: Tensor, row: Mapping[str, Tensor]) -> None:
        """Quantize a matrix [R, C], and overwrite `row` with it: buffer name -> row of the buffer."""

    @abstractmethod
    def dequantize(self, stored: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return n matrices [n, R, C] in `dtype`: a new tensor, or a view of data that have this dtype unquantized.

        `stored` maps names to n rows of each buffer, and to the tables.
        """

    def draw_(self, name: str, buffer: Tensor) -> None:
        """Fill a buffer with random values of the magnitude of a model's weights."""
        if buffer.is_floating_point():
            buffer.normal_(0, 0.02)
        else:
            buffer.random_(torch.iinfo(buffer.dtype).min, torch.iinfo(buffer.dtype).max + 1)

    def linear(self, linear: nn.Linear, weight: Tensor, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Return the library's layer with a weight [out, in] quantized on `device`, in place of `linear`, which has the
        sizes and the bias; `dtype` is that of compute."""
        raise AssertionError(f"{self.name} has no linear layer of its own")

    # --- In checkpoints ---------------------------------------------------------------------------------------------

    def published(self, method: str, settings: Mapping[str, Any]) -> SourceQuantization | None:
        """Return how a checkpoint is published whose `quantization_config` has these settings; None if otherwise than
        in this format.

        Raises:
            UserError: a setting has a value of the wrong type.
        """
        return None

    def layout(self, *shape: int) -> Sizes:
        """Return part -> dtype and shape of a weight that is exported."""
        raise AssertionError(f"{self.name} is not exported")

    def settings(self, others: list[str]) -> dict[str, Any]:
        """Return the `quantization_config` of an export in which the modules `others` are in 16 bits."""
        raise AssertionError(f"{self.name} is not exported")


def require(fits: bool, parts: Mapping[str, Stored]) -> None:
    """Raise `misfit` if `fits` is False."""
    if not fits:
        raise misfit(parts)


def misfit(parts: Mapping[str, Stored]) -> ValueError:
    """Return the error that names dtypes and shapes of parts that do not fit together."""
    found = ", ".join(f"{name or 'weight'} {part.dtype} {[*part.shape]}" for name, part in parts.items())
    return ValueError(f"its parts do not fit together: {found}")
