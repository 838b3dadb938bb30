"""FP8: 8-bit floats (E4M3) with a float32 scale for each block of 128 × 128 weights, as DeepSeek-V3 is published."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import TypedDict

from moetune.formats.base import SAVE_AGAIN, SLACK, Format, Parts, Quantized, Rows, Sizes, require
from moetune.formats.published import Settings, SourceQuantization, invalid, patterns_of
from moetune.json_files import Amount, read_json
from moetune.kernels import AT_ONCE, FP8_BLOCK
from moetune.kernels.operators import operator

LARGEST = torch.finfo(torch.float8_e4m3fn).max


@operator(lambda data, scales, dtype: torch.empty_like(data, dtype=dtype))
def dequantize_fp8(data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize matrices of 8-bit floats, E4M3 without infinities: [n, R, C] in `dtype`.

    Weight and scale are multiplied in float32 and rounded once, bit for bit as by transformers' `Fp8Dequantize`.
    torch's operations compute a row of blocks at a time.

    Args:
        data: [n, R, C] uint8, the bits of the weights.
        scales: [n, ⌈R / 128⌉, ⌈C / 128⌉] float32, one for each block of 128 × 128 weights.
    """
    out = torch.empty_like(data, dtype=dtype)
    for matrix, of_blocks, result in zip(data.view(torch.float8_e4m3fn), scales, out, strict=True):
        for weights, of_row, rows in zip(matrix.split(FP8_BLOCK), of_blocks, result.split(FP8_BLOCK), strict=True):
            rows.copy_(weights.float().mul_(of_row.repeat_interleave(FP8_BLOCK)[: weights.shape[1]]))
    return out


@dataclass(frozen=True)
class BlockFp8(Quantized):
    """A matrix [out, in] of 8-bit floats with a scale for each block of (b0, b1) weights: [⌈out / b0⌉, ⌈in / b1⌉].

    Weight and scale are multiplied in float32 and rounded once to `dtype`, as transformers does.
    """

    PATTERN = r"(.+\.weight)_(scale_inv)"

    block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK)

    @classmethod
    def opened(cls, parts: Parts) -> Self | None:
        if "scale_inv" not in parts:
            return None
        config = read_json(parts[""].file.parent / "config.json", _Config, remedy=SAVE_AGAIN)
        high, wide = config["quantization_config"]["weight_block_size"]
        weight, scales = parts[""], parts["scale_inv"]
        rows, columns = weight.shape
        require(scales.shape == (-(-rows // high), -(-columns // wide)) and scales.dtype in ("F32", "BF16"), parts)
        return cls(weight.file, "BF16", weight.shape, 0, parts, (high, wide))

    def is_in(self, format: Format) -> bool:
        return super().is_in(format) and self.block == (FP8_BLOCK, FP8_BLOCK)

    def as_rows(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        stored["scale_inv"] = stored["scale_inv"].float()
        return {"data": stored[""].view(torch.uint8), "scales": stored["scale_inv"]}

    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        high, wide = self.block
        weight = self.parts[""].rows(start, stop).to(device)
        first = start // high
        scales = self.parts["scale_inv"].rows(first, -(-(start + len(weight)) // high)).to(device).float()
        scales = scales.repeat_interleave(wide, 1)[:, : weight.shape[1]]
        rows = torch.empty(weight.shape, dtype=self.torch_dtype, device=device)
        for number, scale in enumerate(scales, first):  # one row of blocks at a time, to save memory
            those = slice(max(number * high - start, 0), (number + 1) * high - start)
            rows[those] = weight[those].float() * scale
        return rows


class _Blocks(TypedDict):
    weight_block_size: tuple[Amount, Amount]


class _Config(TypedDict):
    quantization_config: _Blocks


class Fp8(Format):
    """8-bit floats in blocks of 128 × 128; quantized and dequantized bit for bit as by transformers."""

    name, formula, layouts = "fp8", "n + 4·⌈R/128⌉·⌈C/128⌉ a matrix [R, C] of n weights", (BlockFp8,)
    bits, is_read_apart = 8, True

    def buffers(self, count: int, shape: tuple[int, int]) -> Sizes:
        high, wide = (-(-size // FP8_BLOCK) for size in shape)
        return {"data": (torch.uint8, (count, *shape)), "scales": (torch.float32, (count, high, wide))}

    def quantize(self, weight: Tensor, row: Rows, largest: Tensor | None = None, keep: bool = False) -> None:
        """Quantize as `Format.quantize` says, bit for bit as transformers' `Fp8Quantize`, which leaves a matrix
        with cut-off blocks in 16 bits.

        A scale, by which codes are multiplied, brings the largest magnitude of its block to 448, the largest of FP8.
        """
        data, scales = row["data"], row["scales"]
        rows, columns = weight.shape
        high = FP8_BLOCK * max(1, AT_ONCE // columns // FP8_BLOCK)
        for first in range(0, rows, high):
            part = weight[first : first + high].float()
            count = len(part)
            blocks = pad(part, (0, -columns % FP8_BLOCK, 0, -count % FP8_BLOCK))
            blocks = blocks.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))  # [r, 128, c, 128]
            of_blocks = blocks.abs().amax((1, 3))
            factors = torch.where(of_blocks > 0, LARGEST / torch.where(of_blocks > 0, of_blocks, 1), 1)
            stored = scales[first // FP8_BLOCK :][: len(factors)]
            if keep:
                fits = of_blocks <= LARGEST * stored * SLACK
                factors = torch.where(fits, 1 / stored, factors)
                stored.copy_(torch.where(fits, stored, 1 / factors))
            else:
                stored.copy_(1 / factors)
            codes = (blocks * factors[:, None, :, None]).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
            codes = codes.view(torch.uint8).flatten(0, 1).flatten(1)
            data[first : first + high].copy_(codes[:count, :columns])

    def dequantize(self, stored: Rows, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return dequantize_fp8(stored["data"], stored["scales"], dtype)

    def published(self, method: str, settings: Settings) -> SourceQuantization | None:
        if method != "fp8" or not (size := settings.get("weight_block_size")):
            return None
        if not isinstance(size, list | tuple) or len(size) != 2 or not all(isinstance(one, int) for one in size):
            raise invalid("weight_block_size", size, "give two numbers")
        is_kept = [*size] == [FP8_BLOCK, FP8_BLOCK]
        left_out = patterns_of(settings, "modules_to_not_convert")
        return SourceQuantization(method, "fp8" if is_kept else None, gate_up_apart=is_kept, left_out=left_out)

    def layout(self, *shape: int) -> Sizes:
        """DeepSeek-V3's: [out, in], and the scales."""
        scales = tuple(-(-size // FP8_BLOCK) for size in shape)
        return {"": (torch.float8_e4m3fn, shape), "scale_inv": (torch.float32, scales)}

    def settings(self, others: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK], "modules_to_not_convert": others,
        }  # fmt: skip
