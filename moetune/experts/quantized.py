"""Frozen weight matrices of several experts, quantized with NF4, int8, FP8, NVFP4 or MXFP4 or stored in 16 or 32 bits.

Shapes: E matrices, each [R, C] = [out_features, in_features].
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moetune.compat.bitsandbytes import functional as bnb
from moetune.compat.torch import HostModule
from moetune.config.schema import FP8_BLOCK, NV_BLOCK, Storage
from moetune.experts.host import ExpertPrefetcher, empty_on_host
from moetune.experts.rounding import round_to_fp8, round_to_mxfp4, round_to_nvfp4
from moetune.kernels import operators as kernels
from moetune.kernels.operators import BLOCK, E2M1, MX_BLOCK, NESTED_BLOCK
from moetune.run.dtypes import DTYPES


class QuantizedExperts(HostModule):
    """E frozen matrices of one shape [R, C], stored in buffers and dequantized on request.

    Bytes of one matrix with n = R·C weights:

    | storage | bytes |
    |---|---|
    | nf4 | n/2 + 4·⌈n/64⌉ |
    | nf4, double quantized | n/2 + ⌈n/64⌉ + 4·⌈n/64/256⌉ + 4 |
    | int8 | n + 4·R |
    | fp8 | n + 4·⌈R/128⌉·⌈C/128⌉ |
    | nvfp4 | 9·R·⌈C/16⌉ + 8 |
    | mxfp4 | 17·⌈n/32⌉ |
    | bf16, fp32 | 2·n, 4·n |

    NF4 and its double quantization are those of QLoRA (arXiv 2305.14314). bitsandbytes quantizes each matrix alone, so
    a matrix equals `bitsandbytes.functional.quantize_4bit` of it bit for bit. In FP8 (E4M3), as DeepSeek-V3 is
    published, each block of 128 × 128 weights shares a float32 scale. In MXFP4 (OCP Microscaling Formats 1.0), 32
    weights of 4 bits (E2M1) share a power of two; in NVFP4, 16 weights of a row share a scale in E4M3, and the matrix a
    global scale. FP8 and MXFP4 are dequantized bit for bit as by transformers, NVFP4 as by ModelOpt and
    compressed-tensors. The buffers are persistent, so that loaders that initialize missing tensors leave them alone.

    Args:
        count: number E of matrices.
        shape: (R, C).
        storage: "nf4", "int8", "fp8", "nvfp4", "mxfp4", "bf16" or "fp32".
        double_quant: for "nf4", quantize the scales as well; ignored for other storage.
        pieces: number of equal row blocks of a matrix that are quantized as separate matrices; more than 1 only for
            "nf4", "fp8" and "nvfp4".
        device: where the buffers are, and where weights are quantized if there is a prefetcher; None for the default.
        prefetcher: if given, the buffers stay in host memory, pinned if `device` is a GPU, even when the model is
            moved, and matrices are dequantized from the prefetcher's copies. The caller adds the module with
            `ExpertPrefetcher.add_layer`.
    """

    data: Tensor
    absmax: Tensor
    nested_absmax: Tensor
    nested_code: Tensor
    offset: Tensor
    scales: Tensor
    pairs: Tensor
    fractions: Tensor

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
        assert pieces == 1 or storage in ("nf4", "fp8", "nvfp4")
        self.count, self.shape, self.storage, self.pieces = count, shape, storage, pieces
        self.double_quant = double_quant and storage == "nf4"
        self.prefetcher = prefetcher
        self._quantizes_on = torch.device("cpu" if device is None else device)
        count *= pieces
        weights, blocks = shape[0] * shape[1] // pieces, -(-shape[0] * shape[1] // pieces // BLOCK)

        def buffer(name: str, size: tuple[int, ...], dtype: torch.dtype) -> None:
            if self.on_host:
                self.register_buffer(name, empty_on_host(size, dtype, self._quantizes_on))
            else:
                self.register_buffer(name, torch.empty(size, dtype=dtype, device=device))

        if storage == "nf4":
            buffer("data", (count, -(-weights // 2)), torch.uint8)
            buffer("absmax", (count, blocks), torch.uint8 if self.double_quant else torch.float32)
            if self.double_quant:
                buffer("nested_absmax", (count, -(-blocks // NESTED_BLOCK)), torch.float32)
                buffer("offset", (count,), torch.float32)
                levels = bnb.create_dynamic_map()
                buffer("nested_code", tuple(levels.shape), levels.dtype)
                self.nested_code.copy_(levels)
        elif storage == "int8":
            buffer("data", (count, *shape), torch.int8)
            buffer("absmax", (count, shape[0]), torch.float32)
        elif storage == "fp8":
            high, wide = shape[0] // pieces, shape[1]
            buffer("data", (count, high, wide), torch.uint8)
            buffer("scales", (count, -(-high // FP8_BLOCK), -(-wide // FP8_BLOCK)), torch.float32)
        elif storage == "nvfp4":
            high, wide = shape[0] // pieces, -(-shape[1] // NV_BLOCK)
            buffer("data", (count, high, wide * NV_BLOCK // 2), torch.uint8)
            buffer("scales", (count, high, wide), torch.uint8)
            buffer("fractions", (count, 2), torch.float32)
        elif storage == "mxfp4":
            groups = -(-weights // MX_BLOCK)
            buffer("data", (count, groups * MX_BLOCK // 2), torch.uint8)
            buffer("scales", (count, groups), torch.uint8)
            values = torch.tensor([*E2M1, *(-value for value in E2M1)])
            buffer("pairs", (256, 2), torch.float32)
            self.pairs.copy_(torch.stack([values.repeat(16), values.repeat_interleave(16)], -1))
        else:
            buffer("data", (count, *shape), DTYPES[storage])

    @property
    def on_host(self) -> bool:
        """Whether the buffers stay in host memory."""
        return self.prefetcher is not None

    @torch.no_grad()
    def quantize_(self, index: int, weight: Tensor) -> None:
        """Quantize `weight` [R, C] and store it as matrix `index`; do nothing for a tensor on the meta device."""
        assert weight.shape == self.shape, f"matrix {tuple(weight.shape)} does not fit a stack of {self.shape}"
        if weight.is_meta:
            return
        weight = weight.to(self._quantizes_on if self.on_host else self.data.device).contiguous()
        match self.storage:
            case "nf4":
                for row, piece in enumerate(weight.chunk(self.pieces), index * self.pieces):
                    data, state = bnb.quantize_4bit(
                        piece, blocksize=BLOCK, compress_statistics=self.double_quant, quant_type="nf4"
                    )
                    self.data[row].copy_(data.view(-1))
                    self.absmax[row].copy_(state.absmax)
                    if self.double_quant:
                        self.nested_absmax[row].copy_(state.state2.absmax)
                        self.offset[row].copy_(state.offset)
            case "int8":
                # bitsandbytes' CUDA kernel accepts only float16; the CPU gets it too, so both store the same bytes.
                for rows in kernels.int8_slices(self.shape):
                    data, scale, _ = bnb.int8_vectorwise_quant(weight[rows].to(torch.float16))
                    self.data[index, rows].copy_(data)
                    self.absmax[index, rows].copy_(scale)
            case "fp8":
                for row, piece in enumerate(weight.chunk(self.pieces), index * self.pieces):
                    round_to_fp8(piece, self.data[row], self.scales[row])
            case "nvfp4":
                for row, piece in enumerate(weight.chunk(self.pieces), index * self.pieces):
                    round_to_nvfp4(piece, self.data[row], self.scales[row], self.fractions[row])
            case "mxfp4":
                round_to_mxfp4(weight.flatten(), self.data[index], self.scales[index])
            case _:
                self.data[index].copy_(weight)

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
        buffers: Mapping[str, Any] = self._buffers if self.prefetcher is None else self.prefetcher.bring(self)
        if self.pieces > 1:
            which = slice(which.start * self.pieces, which.stop * self.pieces)
        data = buffers["data"][which]
        match self.storage:
            case "nf4":
                of_blocks = [buffers["absmax"][which], None, None, None]
                if self.double_quant:
                    of_blocks[1:] = buffers["nested_absmax"][which], buffers["nested_code"], buffers["offset"][which]
                of_piece = math.prod(self.shape) // self.pieces
                return kernels.dequantize_nf4(data, *of_blocks, of_piece, dtype).view(-1, *self.shape)
            case "int8":
                absmax = buffers["absmax"][which]
                return kernels.dequantize_int8(data.flatten(0, 1), absmax.flatten(), dtype).view(data.shape)
            case "fp8":
                return kernels.dequantize_fp8(data, buffers["scales"][which], dtype).view(-1, *self.shape)
            case "nvfp4":
                of_data = buffers["scales"][which], buffers["fractions"][which]
                return kernels.dequantize_nvfp4(data, *of_data, self.shape[1], dtype).view(-1, *self.shape)
            case "mxfp4":
                scales = buffers["scales"][which].flatten()
                weights = kernels.dequantize_mxfp4(data.flatten(), scales, buffers["pairs"], dtype)
                rows, columns = self.shape
                return weights.view(len(data), -1)[:, : rows * columns].reshape(-1, rows, columns)
            case _:
                return data.to(dtype)

    def extra_repr(self) -> str:
        quantized = ", double_quant" if self.double_quant else ""
        return f"{self.count} × {list(self.shape)}, {self.storage}{quantized}{', on the host' if self.on_host else ''}"


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with quantized weights, dequantized in forward and again in backward.

    The weight [out, in] is quantized here, and stored on `device`, or on its own device for None. Of a weight on the
    meta device only the shape is used, and the stored data are uninitialized. For NF4, bitsandbytes' `Linear4bit` is
    used instead.
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

        [out, in] for int8, fp8, bf16 and fp32; bytes of two weights each for NVFP4, [out, in / 2], and MXFP4,
        [out·in / 2].
        """
        return self.stack.data[0]

    def forward(self, input: Tensor) -> Tensor:
        return _QuantizedMatmul.apply(input, self.stack, self.bias)

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
