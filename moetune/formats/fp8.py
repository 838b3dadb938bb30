"""FP8: 8-bit floats with a scale for each block, row, matrix, or 32 weights (MXFP8). Floats are E4M3. Blocks are
128 × 128, as DeepSeek-V3 is published; MXFP8's scales are powers of two."""

from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from moetune.config.schema import Storage
from moetune.errors import UserError
from moetune.formats.base import SLACK, Format, Parts, Quantized, Rows, Sizes, compressed_tensors, refuse_zeros, require
from moetune.formats.source_quantization import (
    Scheme,
    Settings,
    SourceQuantization,
    invalid,
    left_out,
    scheme_of,
    settings_in,
)
from moetune.kernels import AT_ONCE, FP8_BLOCK
from moetune.kernels.operators import operator
from moetune.tensor_files import finite

LARGEST = torch.finfo(torch.float8_e4m3fn).max
MX_BLOCK = 32  # weights of a row that share a power of two in MXFP8
_POWERS = ("U8", "F8_E8M0")  # dtypes of scales that are powers of two, in 8 bits


@operator(lambda data, *more: torch.empty_like(data, dtype=more[-1]))
def dequantize_fp8(data: Tensor, scales: Tensor, high: int, wide: int, dtype: torch.dtype) -> Tensor:
    """Dequantize matrices of 8-bit floats, E4M3 without infinities: [n, R, C] in `dtype`.

    Weight and scale are multiplied in float32 and rounded once, bit for bit as by transformers' `Fp8Dequantize`.
    torch's operations compute `AT_ONCE` weights at a time.

    Args:
        data: [n, R, C] uint8, the bits of the weights.
        scales: [n, ⌈R / high⌉, ⌈C / wide⌉], one for each block of high × wide weights: float32, or uint8 for 2 to the
            power of the value - 127.
        high, wide: rows and columns of a block; 0 for those of the matrix.
    """
    out = torch.empty_like(data, dtype=dtype)
    for matrix, of_blocks, result in zip(data.view(torch.float8_e4m3fn), scales, out, strict=True):
        _multiply(matrix, of_blocks, 0, (high, wide), result)
    return out


def _multiply(weights: Tensor, scales: Tensor, first: int, block: tuple[int, int], out: Tensor) -> None:
    """Write weights times their blocks' scales to `out`; `first` is the row of the matrix that is their first."""
    columns, step = weights.shape[1], max(1, AT_ONCE // weights.shape[1])
    high, wide = block[0] or first + len(weights), block[1] or columns
    if scales.dtype == torch.uint8:
        scales = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    for part, rows in zip(weights.split(step), out.split(step), strict=True):
        factors = scales[torch.arange(first, first + len(part), device=scales.device) // high]
        rows.copy_(part.float().mul_(factors.repeat_interleave(wide, 1)[:, :columns]))
        first += len(part)


@dataclass(frozen=True)
class StoredFp8(Quantized):
    """A matrix [R, C] of 8-bit floats with a scale for each block of (b0, b1) weights: [⌈R / b0⌉, ⌈C / b1⌉].

    Weight and scale are multiplied in float32 and rounded once to `dtype`, as transformers does. The scales are a part
    `scale_inv` (DeepSeek-V3, transformers) or `scale` (compressed-tensors, ModelOpt).
    """

    PATTERN = r"(.+\.weight)_(scale_inv|scale)"

    block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK)

    @classmethod
    def opened(cls, parts: Parts) -> Self | None:
        if "weight" in parts:  # DeepSeek-V4's own names
            parts = {"": parts["weight"], "scale": parts["scale"]}
        scales, weight = parts.get("scale_inv", parts.get("scale")), parts.get("")
        if scales is None or weight is None or weight.dtype != "F8_E4M3":
            return None
        rows, columns = weight.shape
        match scales.shape[::2] if len(scales.shape) == 4 else scales.shape:  # ModelOpt's of blocks: [r, 1, c, 1]
            case () | (1,) | (1, 1):
                block = rows, columns
            case (count,) | (count, 1) if count == rows:
                block = 1, columns
            case (count, groups) if scales.dtype in _POWERS and (count, groups) == (rows, -(-columns // MX_BLOCK)):
                block = 1, MX_BLOCK
            case _:
                settings = settings_in(weight.file.parent)
                block = _block(settings) or (rows, columns)
        fits = scales.numel == -(-rows // block[0]) * -(-columns // block[1])
        require(fits and scales.dtype in ("F32", "BF16", "F16", *_POWERS), parts)
        return cls(weight.file, "BF16", weight.shape, 0, parts, block)

    @property
    def scales(self) -> str:
        """The part with the scales."""
        return "scale_inv" if "scale_inv" in self.parts else "scale"

    @property
    def is_mx(self) -> bool:
        """Whether 32 weights of a row share a power of two."""
        return self.parts[self.scales].dtype in _POWERS and self.block == (1, MX_BLOCK)

    def is_in(self, format: Format) -> bool:
        if not isinstance(format, Fp8) or format.is_mx != self.is_mx:
            return False
        return format.block_of(self.shape) == tuple(map(min, self.block, self.shape))

    def read_scales(self) -> Tensor:
        """Return the scales [⌈R / b0⌉, ⌈C / b1⌉], in float32 or, if `is_mx`, as bits in uint8.

        Raises `UserError` if one is 0, NaN or infinite.
        """
        part = self.parts[self.scales]
        scales = part.whole()
        if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
            scales = finite(scales.view(torch.float8_e8m0fnu), part.name, part.file)
            scales = scales.view(torch.uint8) if self.is_mx else scales.float()
        else:
            scales = scales.float()
            refuse_zeros(scales, part)
        return scales.view([-(-size // block) for size, block in zip(self.shape, self.block, strict=True)])

    def as_rows(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        sizes = [-(-size // block) for size, block in zip(self.shape, self.block, strict=True)]
        scales = stored[self.scales].view(sizes)
        scales = scales.view(torch.uint8) if self.is_mx else scales.float()
        return {"data": stored[""].view(torch.uint8), "scales": scales}

    def as_parts(self, rows: Rows) -> dict[str, Tensor]:
        part, scales = self.parts[self.scales], rows["scales"]
        if part.dtype not in _POWERS:
            return {self.scales: scales.view(part.shape)}
        powers = scales if self.is_mx else scales.to(torch.float8_e8m0fnu)
        if not self.is_mx and not powers.float().equal(scales):
            raise UserError(
                f"--into: {part.name} holds powers of two for blocks of weights, and what trained is too large for a "
                "block; export without --into, or as an adapter"
            )
        return {self.scales: powers.view(part.torch_dtype)}

    def quantized(self, expert: int = 0) -> dict[str, Tensor]:
        return {"data": self.parts[""].rows().view(torch.uint8), "scales": self.read_scales()}

    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        weights, scales = self.parts[""].rows(start, stop).to(device), self.read_scales().to(device)
        rows = torch.empty(weights.shape, dtype=self.torch_dtype, device=device)
        _multiply(weights, scales, start, self.block, rows)
        return rows


def _block(settings: Settings) -> tuple[int, int] | None:
    """Return the rows and columns of a block from settings, None if they have none; raise `UserError` if they are no
    two numbers."""
    if _of_modelopt(settings) == "fp8":
        return FP8_BLOCK, FP8_BLOCK
    scheme = None if settings.get("weight_block_size") else scheme_of(settings)
    size = settings.get("weight_block_size") if scheme is None else scheme.weights.get("block_structure")
    match size:
        case None:
            return None
        case [int(high), int(wide)] if high > 0 and wide > 0:
            return high, wide
        case _:
            raise invalid("weight_block_size", size, "give two numbers")


class Fp8(Format):
    """8-bit floats in blocks; quantized and dequantized bit for bit as by transformers, MXFP8 quantized as by ModelOpt.

    Attributes:
        block: rows and columns of a block; 0 for those of the matrix.
        is_mx: whether scales are powers of two, in 8 bits.
    """

    layouts = (StoredFp8,)
    is_read_apart = True

    def __init__(self, name: Storage, block: tuple[int, int], is_mx: bool = False) -> None:
        self.name, self.block, self.is_mx = name, block, is_mx
        self.bits, self.into_multiple = 8 + 8 / block[1] if is_mx else 8, block[1] if is_mx else 1

    def block_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the rows and columns of a block of a matrix of this shape."""
        return tuple(min(block or size, size) for size, block in zip(shape, self.block, strict=True))

    def buffers(self, count: int, shape: tuple[int, int]) -> Sizes:
        high, wide = (-(-size // block) for size, block in zip(shape, self.block_of(shape), strict=True))
        scales = torch.uint8 if self.is_mx else torch.float32
        return {"data": (torch.uint8, (count, *shape)), "scales": (scales, (count, high, wide))}

    def quantize(self, weight: Tensor, row: Rows, largest: Tensor | None = None, keep: bool = False) -> None:
        """Quantize as `Format.quantize` says, bit for bit as transformers' `Fp8Quantize`, which leaves a matrix with
        cut-off blocks in 16 bits.

        A scale, by which codes are multiplied, brings the largest magnitude of its block to 448, the largest of FP8; a
        power of two brings it to at most that. A matrix with one scale is in memory in float32.
        """
        data, scales = row["data"], row["scales"]
        rows, columns = weight.shape
        high, wide = self.block_of(weight.shape)
        step = high * max(1, AT_ONCE // columns // high)
        for first in range(0, rows, step):
            part = weight[first : first + step].float()
            count = len(part)
            blocks = pad(part, (0, -columns % wide, 0, -count % high))
            blocks = blocks.unflatten(1, (-1, wide)).unflatten(0, (-1, high))  # [r, high, c, wide]
            of_blocks = blocks.abs().amax((1, 3))
            stored = scales[first // high :][: len(of_blocks)]
            factors = self._factors(of_blocks, stored, keep)
            codes = (blocks * factors[:, None, :, None]).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
            codes = codes.view(torch.uint8).flatten(0, 1).flatten(1)
            data[first : first + step].copy_(codes[:count, :columns])

    def _factors(self, of_blocks: Tensor, stored: Tensor, keep: bool) -> Tensor:
        """Return the factors to multiply blocks by, given their largest magnitudes, and set their scales `stored`."""
        if self.is_mx:
            exponents = torch.log2(of_blocks / LARGEST).ceil_().clamp_(-127, 127)  # -127 for zeros
            if keep:
                fits = of_blocks <= torch.ldexp(torch.full_like(of_blocks, LARGEST * SLACK), stored.int() - 127)
                exponents = torch.where(fits, stored.float() - 127, exponents)
            stored.copy_(exponents + 127)
            return torch.exp2(-exponents)
        factors = torch.where(of_blocks > 0, LARGEST / torch.where(of_blocks > 0, of_blocks, 1), 1)
        if keep:
            fits = of_blocks <= LARGEST * stored * SLACK
            factors = torch.where(fits, 1 / stored, factors)
            stored.copy_(torch.where(fits, stored, 1 / factors))
        else:
            stored.copy_(1 / factors)
        return factors

    def dequantize(self, stored: Rows, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        weights: Tensor = dequantize_fp8(stored["data"], stored["scales"], *self.block, dtype)
        return weights

    def published(self, method: str, settings: Settings) -> SourceQuantization | None:
        name = _published(method, settings)
        if name is None or (name or "fp8") != self.name:
            return None
        scheme = scheme_of(settings) if method == "compressed-tensors" else None
        only = () if scheme is None else scheme.only
        return SourceQuantization(
            method, name or None, gate_up_apart=bool(name), left_out=left_out(settings), only=only
        )

    def layout(self, *shape: int) -> Sizes:
        """DeepSeek-V3's, [out, in] and the scales; of MXFP8 ModelOpt's and compressed-tensors'."""
        (_, sizes), (kind, scales) = self.buffers(1, (shape[0], shape[1])).values()
        name = "scale" if self.is_mx else "scale_inv"
        return {"": (torch.float8_e4m3fn, sizes[1:]), name: (kind, scales[1:])}

    def settings(self, others: list[str]) -> dict[str, Any]:
        if self.is_mx:
            groups = {"strategy": "group", "group_size": MX_BLOCK, "scale_dtype": "torch.uint8"}
            return compressed_tensors("mxfp8-quantized", others, num_bits=8, type="float", **groups)
        return {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [*self.block], "modules_to_not_convert": others,
        }  # fmt: skip


def _published(method: str, settings: Settings) -> Storage | Literal[""] | None:
    """Return the format of FP8 that settings describe; empty if it is read but not kept, None if it is none."""
    if method == "mxfp8":
        return "mxfp8"
    if method == "fbgemm_fp8":
        return "fp8-row"
    if method == "modelopt":
        return _of_modelopt(settings)
    if method == "compressed-tensors":
        return _of_scheme(scheme_of(settings))
    if method != "fp8" or settings.get("expert_dtype") == "fp4" or "e4m3" not in str(settings.get("fmt", "e4m3")):
        return None
    block = _block(settings)
    if block is None:
        return "fp8-tensor"
    return "mxfp8" if block == (1, MX_BLOCK) else "fp8" if block == (FP8_BLOCK, FP8_BLOCK) else ""


def _of_modelopt(settings: Settings) -> Storage | None:
    """Return the format of one of ModelOpt's algorithms, whose names it writes in capitals, those of blocks in small
    letters; None if it is none of FP8."""
    names: dict[str, Storage] = {
        "FP8": "fp8-tensor", "FP8_PER_CHANNEL_PER_TOKEN": "fp8-row", "FP8_PB_WO": "fp8", "FP8_PB_REAL": "fp8",
        "MXFP8": "mxfp8",
    }  # fmt: skip
    return names.get(str(settings.get("quant_algo")).upper())


def _of_scheme(scheme: Scheme | None) -> Storage | None:
    """Return the format of a scheme of compressed-tensors; None if it is none of FP8 that is read."""
    is_fp8 = scheme is not None and scheme.format in ("float-quantized", "naive-quantized", "mxfp8-quantized")
    if scheme is None or not is_fp8 or scheme.kind[:2] != (8, "float"):
        return None
    match scheme.kind[2], scheme.weights.get("group_size"), scheme.weights.get("block_structure"):
        case "group", size, _ if size == MX_BLOCK:
            return "mxfp8"
        case "block", _, [*size] if size == [FP8_BLOCK, FP8_BLOCK]:
            return "fp8"
        case "tensor", *_:
            return "fp8-tensor"
        case "channel", *_:
            return "fp8-row"
        case _:
            return None


FORMATS_OF_FP8 = (
    Fp8("fp8", (FP8_BLOCK, FP8_BLOCK)), Fp8("fp8-row", (1, 0)), Fp8("fp8-tensor", (0, 0)),
    Fp8("mxfp8", (1, MX_BLOCK), True),
)  # fmt: skip
