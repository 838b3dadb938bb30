"""Frozen matrices of several experts, or of a linear layer, in a format of `moetune/formats`.

Shapes: E matrices, each [R, C] = [out_features, in_features].
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moetune.compat.torch import HostModule
from moetune.config.schema import Storage
from moetune.experts.host import ExpertPrefetcher, empty_on_host
from moetune.formats.rounding import Rounding
from moetune.formats.table import format_of
from moetune.kernels.runner import runner


class QuantizedExperts(HostModule):
    """E frozen matrices of one shape [R, C], stored in buffers and dequantized on request.

    Each matrix is quantized alone. The buffers (`Format.buffers`, `Format.tables`) are persistent, so that loaders that
    initialize missing tensors leave them alone.

    Args:
        count: number E of matrices.
        shape: (R, C).
        storage, double_quant: name of the format (`FORMATS`), and whether NF4's scales are quantized as well.
        pieces: number of equal row blocks of a matrix that are quantized as separate matrices.
        device: where the buffers are, and where weights are quantized if there is a prefetcher; None for the default.
        prefetcher: if given, the buffers stay in host memory, pinned if `device` is a GPU, even when the model is
            moved, and matrices are dequantized from the prefetcher's copies. The caller adds the module with
            `ExpertPrefetcher.add_layer`.
    """

    data: Tensor

    def __init__(
        self,
        count: int,
        shape: tuple[int, int],
        storage: Storage,
        *,
        double_quant: bool = True,
        pieces: int = 1,
        device: torch.device | str | None = None,
        prefetcher: ExpertPrefetcher | None = None,
    ) -> None:
        super().__init__()
        self.count, self.shape, self.storage, self.pieces = count, shape, storage, pieces
        self.format = format_of(storage, double_quant)
        self._piece = shape[0] // pieces, shape[1]
        self._views: dict[tuple[int, int], tuple[Tensor, dict[str, Tensor]]] = {}
        self.prefetcher = prefetcher
        self._quantizes_on = torch.device("cpu" if device is None else device)
        tables = self.format.tables()
        self._tables = tuple(tables)
        for name, (dtype, size) in self.format.buffers(count * pieces, self._piece).items():
            if self.on_host:
                self.register_buffer(name, empty_on_host(size, dtype, self._quantizes_on))
            else:
                self.register_buffer(name, torch.empty(size, dtype=dtype, device=device))
        for name, values in tables.items():
            self.get_buffer(name).copy_(values)

    @property
    def on_host(self) -> bool:
        """Whether the buffers stay in host memory."""
        return self.prefetcher is not None

    def names_on_host(self) -> list[str]:
        return [*self._buffers] if self.on_host else []

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HostModule:
        """Move the buffers as `to`, `half` and their like ask; those of a quantized format keep their dtypes."""

        def moved(buffer: Tensor) -> Tensor:
            changed = fn(buffer)
            is_cast = self.format.dtype is None and changed.dtype != buffer.dtype
            return buffer.to(changed.device) if is_cast else changed

        return super()._apply(moved, recurse)

    def is_table(self, name: str) -> bool:
        """Return whether the buffer with the last part of `name` is one that all matrices share."""
        return name.rpartition(".")[2] in self._tables

    @torch.no_grad()
    def quantize_(self, index: int, weight: Tensor) -> None:
        """Quantize `weight` [R, C] and store it as matrix `index`; do nothing for a tensor on the meta device."""
        assert weight.shape == self.shape, f"matrix {tuple(weight.shape)} does not fit a stack of {self.shape}"
        if weight.is_meta:
            return
        weight = weight.to(self._quantizes_on if self.on_host else self.data.device).contiguous()
        for number, piece in enumerate(weight.chunk(self.pieces), index * self.pieces):
            self.format.quantize(piece, {n: b[number] for n, b in self.named_buffers() if n not in self._tables})

    @torch.no_grad()
    def put_quantized_(self, index: int, *pieces: Mapping[str, Tensor]) -> None:
        """Store data that are quantized already as matrix `index`.

        There are as many arguments `pieces` as `self.pieces`. Each maps buffer names (`data`, `absmax`, `scales`, …) to
        tensors with the shape and dtype of one row of that buffer; a difference, or another number of pieces, raises
        `AssertionError`.
        """
        assert len(pieces) == self.pieces
        for number, stored in enumerate(pieces, index * self.pieces):
            for name, tensor in stored.items():
                row = self.get_buffer(name)[number]
                assert row.shape == tensor.shape, f"{name} {tuple(tensor.shape)} does not fit {tuple(row.shape)}"
                assert row.dtype == tensor.dtype
                row.copy_(tensor)

    def matrix(self, index: int, dtype: torch.dtype) -> Tensor:
        """Return matrix `index` [R, C] in `dtype`: a new tensor, or a view of the buffer if it has that dtype."""
        return self.matrices(slice(index, index + 1), dtype)[0]

    def matrices(self, which: slice, dtype: torch.dtype) -> Tensor:
        """Return the matrices of the slice `which`, whose start and stop are given, in `dtype`: [n, R, C].

        Each is bit for bit as `matrix` returns it. The result is a new tensor, or a view of the buffer if the storage
        is unquantized and has that dtype.
        """
        if dtype == torch.float64:  # to which neither bitsandbytes nor the kernels dequantize
            return self.matrices(which, torch.float32).double()
        return self.format.dequantize(self._rows(which), self._piece, dtype).view(-1, *self.shape)

    def merged(
        self, which: slice, dtype: torch.dtype, rounding: Rounding, merge_: Callable[[int, Tensor], object] | None
    ) -> Tensor:
        """Return the matrices of the slice `which` with what `merge_` adds, rounded, in `dtype`: [n, R, C].

        One matrix at a time is in float32. `merge_(index, weight)` adds to it in place; `index` is that in the slice.
        """
        stored = self._rows(which)

        def exact(index: int) -> Tensor:
            rows = slice(index * self.pieces, (index + 1) * self.pieces)
            of_one = {name: buffer if name in self._tables else buffer[rows] for name, buffer in stored.items()}
            weight = self.format.dequantize(of_one, self._piece, torch.float32).view(self.shape)
            if self.format.dtype == torch.float32:  # a view of the buffer
                weight = weight.clone()
            if merge_ is not None:
                merge_(index, weight)
            return weight

        count = which.stop - which.start
        return rounding.rounded(
            map(exact, runner.each(count, stored["data"])), count, dtype, pieces=self.pieces, stored=stored
        )

    def _rows(self, which: slice) -> Mapping[str, Tensor]:
        """Return the rows of the buffers that hold the matrices of a slice, and the tables."""
        buffers: Mapping[str, Any] = self._buffers if self.prefetcher is None else self.prefetcher.bring(self)
        # views of buffers take as long as a launch: they are made once, until the buffers are others
        data, stored = self._views.get((which.start, which.stop), (None, {}))
        if data is not buffers["data"]:
            rows = slice(which.start * self.pieces, which.stop * self.pieces)
            stored = {name: buffer if name in self._tables else buffer[rows] for name, buffer in buffers.items()}
            if self.prefetcher is None:
                self._views[which.start, which.stop] = buffers["data"], stored
        return stored

    def extra_repr(self) -> str:
        return f"{self.count} × {list(self.shape)}, {self.format.label}{', on the host' if self.on_host else ''}"


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with quantized weights, dequantized in forward and again in backward.

    The weight [out, in] is quantized here, and stored on `device`, or on its own device for None. Of a weight on the
    meta device only the shape is used, and the stored data are uninitialized.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, storage: Storage, device: torch.device | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.stack = QuantizedExperts(1, (self.out_features, self.in_features), storage, device=device or weight.device)
        self.stack.quantize_(0, weight)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The stored data of the weight, from which libraries that wrap linear layers read its device and dtype.

        [out, in], or [out, in / 2] where a byte holds two weights.
        """
        return self.stack.data[0]

    @property
    def W_q(self) -> Tensor:
        """The stored data, under a name at which PEFT calls `dequantize` for the weight, as for the norms of DoRA."""
        return self.weight

    def dequantize(self) -> Tensor:
        """Return the weight [out, in] in float32."""
        return self.stack.matrix(0, torch.float32)

    def forward(self, input: Tensor) -> Tensor:
        apply: Callable[..., Tensor] = _QuantizedMatmul.apply
        return apply(input, self.stack, self.bias)

    def reset_parameters(self) -> None:
        """Do nothing: the weight is quantized already."""


class _QuantizedMatmul(torch.autograd.Function):
    """Autograd function of a linear layer that dequantizes its frozen weight in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stack: QuantizedExperts, bias: Tensor | None) -> Tensor:
        ctx.stack = stack
        return nn.functional.linear(x, stack.matrix(0, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None]:
        _, _, need_bias = ctx.needs_input_grad
        dx = grad @ ctx.stack.matrix(0, grad.dtype)
        return dx, None, grad.flatten(0, -2).sum(0) if need_bias else None
