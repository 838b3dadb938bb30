"""MXFP4 (OCP Microscaling Formats 1.0): 4-bit codes, 32 share a power of two; gpt-oss, DeepSeek-V4."""

from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from moetune.formats.base import Format, Parts, Quantized, Rows, Sizes, require
from moetune.formats.e2m1 import LEVELS, e2m1_codes
from moetune.formats.source_quantization import Settings, SourceQuantization, scheme_of
from moetune.kernels import AT_ONCE
from moetune.kernels.operators import operator
from moetune.tensor_files import finite

BLOCK = 32  # weights that share one scale
_BYTES = ("I8", "U8")
UNPACKED_AT_ONCE = 1 << 24  # weights that are dequantized at a time; their int32 indices take 32 MiB


@operator(lambda data, scales, pairs, dtype: data.new_empty(2 * len(data), dtype=dtype))
def dequantize_mxfp4(data: Tensor, scales: Tensor, pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize MXFP4 blocks of 32 weights: a flat tensor [weights] in `dtype`, which is 2 or 4 bytes wide.

    Bit for bit transformers' `convert_moe_packed_tensors`, without its transposition. torch's operations look up both
    weights of a byte together, and compute `UNPACKED_AT_ONCE` weights at a time; for each of these they need at most 2
    bytes besides the result.

    Args:
        data: [weights / 2] uint8, two codes per byte.
        scales: [weights / 32] uint8, exponent + 127 of each block.
        pairs: [256, 2] float32, the two values of each byte.
    """
    as_one = {2: torch.int32, 4: torch.int64}[dtype.itemsize]
    pair = pairs.to(dtype).view(as_one).flatten()
    out = torch.empty(2 * len(data), dtype=dtype, device=data.device)
    of_pairs, of_blocks = out.view(as_one), out.view(-1, BLOCK)
    exponents = scales.to(torch.int32).sub_(127)[:, None]
    for first in range(0, len(data), UNPACKED_AT_ONCE // 2):
        bytes_ = slice(first, first + UNPACKED_AT_ONCE // 2)
        torch.index_select(pair, 0, data[bytes_].to(torch.int32), out=of_pairs[bytes_])
        blocks = slice(2 * first // BLOCK, 2 * bytes_.stop // BLOCK)
        torch.ldexp(of_blocks[blocks], exponents[blocks], out=of_blocks[blocks])
    return out


class StoredMxfp4(Quantized):
    """A layer's experts in MXFP4, dequantized to [E, in, out].

    Parts are uint8: `blocks` [E, out, in / 32, 16], two 4-bit floats per byte, and `scales` [E, out, in / 32],
    exponents + 127.
    """

    PATTERN = r"(.+)_(blocks|scales)"
    MAIN = (("_blocks", "_scales"),)
    STACKS = True

    @classmethod
    def opened(cls, parts: Parts) -> Self | None:
        if "blocks" not in parts:
            return None
        blocks, scales = parts["blocks"], parts["scales"]
        experts, out, groups, _ = blocks.shape
        require(blocks.shape == (*scales.shape, BLOCK // 2) and blocks.dtype == scales.dtype == "U8", parts)
        return cls(blocks.file, "BF16", (experts, BLOCK * groups, out), 0, parts)

    def as_rows(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        finite(stored["scales"].view(torch.float8_e8m0fnu), self.parts["scales"].name, self.parts["scales"].file)
        return {"data": stored["blocks"].flatten(), "scales": stored["scales"].flatten()}

    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks, scales = (self.parts[name].rows(start, stop) for name in ("blocks", "scales"))
        finite(scales.view(torch.float8_e8m0fnu), self.parts["scales"].name, self.parts["scales"].file)
        blocks, scales = blocks.to(device), scales.to(device)
        return convert_moe_packed_tensors(blocks, scales, dtype=self.torch_dtype)


class Fp4Rows(Quantized):
    """A matrix [R, C] in MXFP4: codes [R, C / 2], two in a byte, and exponents + 127 for 32 of a row, [R, C / 32].

    Parts are `weight` and `scale` (DeepSeek-V4, under names of its own), or `packed` and `scale` (compressed-tensors).
    """

    PATTERN = r"((?:.+\.)?(?:layers|mtp)\.\d+\.(?:attn|ffn)\..+)\.(weight|scale)"
    TAIL = ".weight"
    MAIN = ((".weight", ".scale"),)

    @classmethod
    def opened(cls, parts: Parts) -> Self | None:
        codes, scales = parts.get("weight", parts.get("packed")), parts.get("scale")
        if parts.keys() - {"weight", "packed", "scale"} or codes is None or scales is None or codes.dtype not in _BYTES:
            return None
        rows, half = codes.shape
        require(scales.dtype in ("U8", "F8_E8M0") and scales.shape == (rows, 2 * half / BLOCK), parts)
        return cls(codes.file, "BF16", (rows, 2 * half), 0, parts)

    def as_rows(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        codes, part = stored["weight" if "weight" in stored else "packed"], self.parts["scale"]
        scales = finite(stored["scale"].view(torch.float8_e8m0fnu), part.name, part.file).view(torch.uint8)
        return {"data": codes.view(torch.uint8).flatten(), "scales": scales.flatten()}

    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        rows = self.as_rows({name: part.rows(start, stop) for name, part in self.parts.items()})
        pairs = Mxfp4().tables()["pairs"].to(device)
        weights = dequantize_mxfp4(rows["data"].to(device), rows["scales"].to(device), pairs, self.torch_dtype)
        matrices: Tensor = weights.view(-1, self.shape[1])
        return matrices


class Mxfp4(Format):
    """E2M1 in blocks of 32 weights, of experts only; dequantized bit for bit as by transformers."""

    name, layouts = "mxfp4", (StoredMxfp4, Fp4Rows)
    bits, quantizes_linears, is_read_apart, into_multiple = 4.25, False, True, BLOCK

    def buffers(self, count: int, shape: tuple[int, int]) -> Sizes:
        groups = -(-shape[0] * shape[1] // BLOCK)
        data, scales = (torch.uint8, (count, groups * BLOCK // 2)), (torch.uint8, (count, groups))
        return {"data": data, "scales": scales, "pairs": (torch.float32, (256, 2))}

    def tables(self) -> dict[str, Tensor]:
        values = torch.tensor(LEVELS)
        return {"pairs": torch.stack([values.repeat(16), values.repeat_interleave(16)], -1)}

    def quantize(self, weight: Tensor, row: Rows, largest: Tensor | None = None, keep: bool = False) -> None:
        """Quantize as `Format.quantize` says; weights of a block may be of two rows.

        The scale of a block is the power of two that brings its largest magnitude into [4, 8); scaled magnitudes above
        6 become 6 (OCP Microscaling Formats 1.0, section 6.3).
        """
        weights, data, scales = weight.flatten(), row["data"], row["scales"]
        for first in range(0, len(weights), AT_ONCE):
            part = weights[first : first + AT_ONCE].float()
            if lacking := -len(part) % BLOCK:
                part = pad(part, (0, lacking))
            blocks = part.view(-1, BLOCK)
            exponents = (torch.frexp(blocks.abs().amax(1)).exponent - 3).clamp_(-127, 127)
            of_blocks = scales[first // BLOCK :][: len(blocks)]
            if keep:
                exponents = torch.maximum(exponents, of_blocks.to(torch.int32) - 127)
            data[first // 2 :][: len(part) // 2].copy_(e2m1_codes(torch.ldexp(blocks, -exponents[:, None])).flatten())
            of_blocks.copy_(exponents + 127)

    def dequantize(self, stored: Rows, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        data, (rows, columns) = stored["data"], shape
        weights = dequantize_mxfp4(data.flatten(), stored["scales"].flatten(), stored["pairs"], dtype)
        matrices: Tensor = weights.view(len(data), -1)[:, : rows * columns].reshape(-1, rows, columns)
        return matrices

    def published(self, method: str, settings: Settings) -> SourceQuantization | None:
        scheme = scheme_of(settings) if method == "compressed-tensors" else None
        is_in_rows = method == "fp8" and settings.get("expert_dtype") == "fp4"  # DeepSeek-V4: experts only
        is_in_rows |= scheme is not None and scheme.format == "mxfp4-pack-quantized" and scheme.kind[:2] == (4, "float")
        return (
            SourceQuantization(method, self.name, gate_up_apart=is_in_rows) if method == "mxfp4" or is_in_rows else None
        )

    def layout(self, *shape: int) -> Sizes:
        """gpt-oss's, of the experts of a layer [E, in, out]."""
        experts, columns, rows = shape
        scales = (experts, rows, columns // BLOCK)
        return {"blocks": (torch.uint8, (*scales, BLOCK // 2)), "scales": (torch.uint8, scales)}

    def settings(self, others: list[str]) -> dict[str, Any]:
        return {"quant_method": "mxfp4", "modules_to_not_convert": others}
