"""`Format`: the interface of a format of frozen weights; `Quantized`: a checkpoint's weight so stored.

A format is a subclass of `Format` in a file of its own, with a subclass of `Quantized` for each layout that checkpoints
have of it, and a place in `table.py`.

Shapes: a matrix is [R, C] = [out_features, in_features].
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from moetune.config.schema import Storage
from moetune.errors import UserError
from moetune.formats.source_quantization import Settings, SourceQuantization
from moetune.tensor_files import Stored

SLACK = 1 + 2**-5
"""Factor by which a block's largest magnitude may exceed the range of a scale that stays: less than half a step."""
Parts = Mapping[str, Stored]
"""Suffix of a part's tensor name (`scales`, `absmax`, …; empty for the weight's own name) -> the tensor."""
Rows = Mapping[str, Tensor]
"""Name of a buffer -> its row of one matrix, or its rows of several; and name of a table -> the table."""
Sizes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Name of a tensor -> its dtype and shape."""


@dataclass(frozen=True)
class Quantized(Stored, ABC):
    """A weight that is stored quantized, in several tensors. Rows are dequantized when they are read.

    Attributes:
        PATTERN: regular expression of the names of its parts: group 1 with `TAIL` is the weight's name, group 2 the
            part.
        MAIN: endings of the names of parts of which one set is always there, whatever other parts are missing.
        STACKS: whether the weight is a stack of all experts of a layer, [E, in, out], and not a matrix.
        file: file of the weight's largest part.
        dtype: dtype of dequantized rows, in safetensors' spelling.
        shape: shape of the dequantized weight.
        offset: not used.
        parts: suffix of the part's tensor name (`scales`, `absmax`, …; empty for the weight's own name) -> the tensor.
    """

    PATTERN: ClassVar[str]
    TAIL: ClassVar[str] = ""
    MAIN: ClassVar[tuple[tuple[str, ...], ...]] = (("",),)
    STACKS: ClassVar[bool] = False

    parts: Parts = field(default_factory=dict, repr=False)

    @classmethod
    @abstractmethod
    def opened(cls, parts: Parts) -> Self | None:
        """Return the weight that is stored as `parts`; None if they are of another layout.

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
    def as_rows(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the parts of a matrix as rows of buffers (`Format.buffers`), if `is_in` the format.

        They are views, so that `Format.quantize` changes the parts; what can be none replaces its part in `stored`.
        """

    def as_parts(self, rows: Rows) -> dict[str, Tensor]:
        """Return the parts of which `as_rows` returned no view, from what it returned."""
        return {}

    def stored(self, expert: int = 0) -> dict[str, Tensor]:
        """Return part -> tensor; of a stack, that of one expert."""
        parts = self.parts.items()
        return {name: one.rows(expert, expert + 1) if self.STACKS else one.whole() for name, one in parts}

    def quantized(self, expert: int = 0) -> dict[str, Tensor]:
        """Return the rows of buffers that the matrix, or of a stack one expert, is stored in, if `is_in` the format."""
        return self.as_rows(self.stored(expert))

    def is_in(self, format: "Format") -> bool:
        """Return whether the stored tensors are buffers of a format."""
        return type(self) in format.layouts

    def write(self, rows: Tensor, start: int = 0) -> None:
        """Raise `AssertionError`: quantized weights are read only."""
        raise AssertionError("what is quantized is not written to")


class Format(ABC):
    """A format in which frozen matrices are stored: a value of `model.base`.

    Matrices are stored in buffers with a row for each, and may share tables. A format is stateless.

    Attributes:
        name: the value of `model.base`.
        layouts: how checkpoints store it.
        quantizes_linears: whether linear layers are quantized in it; else experts only, or nothing.
        has_own_linear: whether the library that quantizes has a linear layer, which `linear` returns.
        dtype: the dtype of weights that are not quantized; else None.
        bits: bits of a weight, its share of the scales included, in large matrices.
        is_read_apart: whether checkpoints in it have tensors for each matrix, of which one at a time is in memory.
        into_multiple: number of columns of which a matrix must have a multiple to be exported in it.
        unpacked_by: bytes a weight that temporary tensors take while a published matrix is brought into the format.
        joins_scales: whether inference needs one largest scale for matrices that it joins.
    """

    name: Storage
    bits: float
    layouts: ClassVar[tuple[type[Quantized], ...]] = ()
    quantizes_linears: ClassVar[bool] = True
    has_own_linear: ClassVar[bool] = False
    dtype: torch.dtype | None = None
    is_read_apart: ClassVar[bool] = False
    into_multiple: int = 1
    joins_scales: ClassVar[bool] = False
    unpacked_by: ClassVar[int] = 0

    @property
    def label(self) -> str:
        """The name with what else there is to say, for reports."""
        return self.name

    # --- In memory --------------------------------------------------------------------------------------------------

    @abstractmethod
    def buffers(self, count: int, shape: tuple[int, int]) -> Sizes:
        """Return the buffers of `count` matrices [R, C], each with a first dimension of `count`, and the tables."""

    def tables(self) -> dict[str, Tensor]:
        """Return name -> values of the buffers that matrices share."""
        return {}

    @abstractmethod
    def quantize(self, weight: Tensor, row: Rows, largest: Tensor | None = None, keep: bool = False) -> None:
        """Quantize a matrix [R, C] to the nearest values, ties to even, and overwrite `row` with it.

        Temporary tensors hold about `AT_ONCE` weights. Only formats that are exported use the last two arguments.

        Args:
            row: buffer name -> row of the buffer.
            largest: a magnitude, at least that of every weight, that a scale of the whole matrix must allow, as where
                several matrices share it; by default the matrix's own.
            keep: `row` holds an earlier quantization, of which a block's scale stays unless a weight is too large for
                it, so that weights that hardly changed are rounded to the codes that they had.
        """

    @abstractmethod
    def dequantize(self, stored: Rows, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return n matrices [n, R, C] in `dtype`: a new tensor, or a view of data that have this dtype unquantized.

        `stored` maps names to n rows of each buffer, and to the tables.
        """

    def linear(self, linear: nn.Linear, weight: Tensor, dtype: torch.dtype, device: torch.device) -> nn.Module | None:
        """Return the library's linear layer with a weight [out, in] quantized on `device`; None if it has none.

        It takes the place of `linear`, which has the sizes and the bias; `dtype` is that of compute.
        """
        return None

    # --- In checkpoints ---------------------------------------------------------------------------------------------

    def published(self, method: str, settings: Settings) -> SourceQuantization | None:
        """Return how a checkpoint is published whose `quantization_config` has these settings; None if otherwise than
        in this format.

        Raises:
            UserError: a setting has a value of the wrong type.
        """
        return None

    def layout(self, *shape: int) -> Sizes:
        """Return part -> dtype and shape of a weight that is exported."""
        raise AssertionError(f"{self.name} is not exported")

    def constants(self, *shape: int) -> dict[str, Tensor]:
        """Return part -> values, of parts of an exported weight that only its shape determines."""
        return {}

    def settings(self, others: list[str]) -> dict[str, Any]:
        """Return the `quantization_config` of an export in which the modules `others` are in 16 bits."""
        raise AssertionError(f"{self.name} is not exported")


def compressed_tensors(format: str, others: list[str], **weights: Any) -> dict[str, Any]:
    """Return the `quantization_config` of compressed-tensors for linear layers whose weights are in `format`.

    `weights` are its settings of them, and the modules `others` are in 16 bits.
    """
    group = {"targets": ["Linear"], "weights": weights | {"symmetric": True, "dynamic": False}, "format": format}
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": others,
    }  # fmt: skip


def largest_of(weight: Tensor) -> Tensor:
    """Return the largest magnitude of a tensor in float32, without a copy of its size."""
    low, high = weight.aminmax()
    return torch.maximum(low.abs(), high.abs()).float()


def require(fits: bool, parts: Parts) -> None:
    """Raise `ValueError`, naming the dtypes and shapes of the parts, if `fits` is False."""
    if not fits:
        listed = ", ".join(f"{name or 'weight'} {part.dtype} {[*part.shape]}" for name, part in parts.items())
        raise ValueError(f"its parts do not fit together: {listed}")


def refuse_zeros(scales: Tensor, part: Stored) -> None:
    """Raise `UserError` if one of the scales that `part` holds is 0, of which no program makes any."""
    if not scales.all():
        raise UserError(f"{part.name} holds a scale that is 0, in {str(part.file)!r}; the checkpoint is damaged")
