"""NVFP4: 4-bit codes, 16 share a scale in E4M3, a matrix a global scale."""

from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from moetune.formats.base import (
    SLACK,
    Format,
    Parts,
    Quantized,
    Rows,
    Sizes,
    compressed_tensors,
    largest_of,
    refuse_zeros,
    require,
)
from moetune.formats.e2m1 import E2M1, LEVELS, e2m1_codes
from moetune.formats.source_quantization import Settings, SourceQuantization, left_out, scheme_of
from moetune.kernels import AT_ONCE
from moetune.kernels.operators import operator

BLOCK = 16  # weights of a row that share one scale
LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST_FP8 = torch.finfo(torch.float8_e4m3fn).smallest_normal / 8


@operator(lambda data, scales, fractions, columns, dtype: data.new_empty((*data.shape[:2], columns), dtype=dtype))
def dequantize_nvfp4(data: Tensor, scales: Tensor, fractions: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Dequantize NVFP4 matrices of `columns` columns: [n, R, C] in `dtype`.

    A weight is level · (scale · numerator / denominator), computed in float32 and rounded once. The global scale of a
    matrix is a fraction, because ModelOpt multiplies by it and compressed-tensors divides by it; with 1 in the other
    place, the result is bit for bit that of either. torch's operations compute `AT_ONCE` weights at a time.

    Args:
        data: [n, R, 8·B] uint8, two E2M1 codes per byte, the first in the low bits; B = ⌈C / 16⌉.
        scales: [n, R, B] uint8, the bits of an E4M3 scale for each block of 16 weights of a row.
        fractions: [n, 2] float32, numerator and denominator.
    """
    out = data.new_empty((*data.shape[:2], columns), dtype=dtype)
    levels = torch.tensor(LEVELS, device=data.device)
    high = max(1, AT_ONCE // columns)
    for matrix, of_blocks, (over, under), result in zip(data, scales, fractions, out, strict=True):
        for codes, of_rows, rows in zip(matrix.split(high), of_blocks.split(high), result.split(high), strict=True):
            picked = torch.stack([codes & 15, codes >> 4], -1).flatten().int()
            weights = levels.index_select(0, picked).view(*of_rows.shape, BLOCK)
            weights *= (of_rows.view(torch.float8_e4m3fn).float() * over / under)[..., None]
            rows.copy_(weights.flatten(1)[:, :columns])
    return out


class StoredNvfp4(Quantized):
    """A matrix [out, in] in NVFP4: 16 weights of a row share a scale of 8 bits (E4M3), and the matrix a global scale.

    Parts are "" or `packed` [out, in / 2] uint8, two E2M1 codes per byte, the first in the low bits; `scale` [out, in /
    16]; and one float32: `scale_2` (ModelOpt) is multiplied, `global_scale` (compressed-tensors) divided by. Rows are
    computed in float32 and rounded once to `dtype`, as by either library for bfloat16.
    """

    PATTERN = r"(.+\.weight)_(packed|scale|scale_2|global_scale)"
    MAIN = (("",), ("_packed",))

    @classmethod
    def opened(cls, parts: Parts) -> Self | None:
        of_matrix = parts.keys() & {"scale_2", "global_scale"}
        if not of_matrix:
            return None
        codes, scales, scale = parts["packed" if "packed" in parts else ""], parts["scale"], parts[of_matrix.pop()]
        rows, half = codes.shape
        kinds = codes.dtype, scales.dtype, scale.dtype, scale.numel
        fits = codes.shape == (scales.shape[0], BLOCK // 2 * scales.shape[1])
        require(kinds == ("U8", "F8_E4M3", "F32", 1) and fits, parts)
        return cls(codes.file, "BF16", (rows, 2 * half), 0, parts)

    @property
    def of_matrix(self) -> str:
        """The part with the global scale."""
        return "scale_2" if "scale_2" in self.parts else "global_scale"

    @property
    def fraction(self) -> Tensor:
        """The global scale as a factor and a divisor, of which one is 1: [2] float32."""
        scale, one = self.parts[self.of_matrix].rows().float().reshape(1), torch.ones(1)
        return torch.cat([scale, one] if self.of_matrix == "scale_2" else [one, scale])

    def quantized(self, expert: int = 0) -> dict[str, Tensor]:
        rows = super().quantized(expert)
        refuse_zeros(rows["fractions"], self.parts[self.of_matrix])
        return rows

    def as_rows(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        data, scales = stored["packed" if "packed" in stored else ""], stored["scale"].view(torch.uint8)
        return {"data": data, "scales": scales, "fractions": self.fraction}

    def as_parts(self, rows: Rows) -> dict[str, Tensor]:
        over, under = rows["fractions"]
        return {"scale_2": over / under} if self.of_matrix == "scale_2" else {"global_scale": under}

    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        parts = {name: part.rows(start, stop) for name, part in self.parts.items() if name != self.of_matrix}
        matrix = {name: rows[None].to(device) for name, rows in self.as_rows(parts).items()}
        refuse_zeros(matrix["fractions"], self.parts[self.of_matrix])
        high, wide = self.shape
        return Nvfp4().dequantize(matrix, (high, wide), self.torch_dtype)[0]


class Nvfp4(Format):
    """E2M1 in blocks of 16 weights of a row; dequantized bit for bit as by ModelOpt and compressed-tensors."""

    name, layouts = "nvfp4", (StoredNvfp4,)
    bits, is_read_apart, into_multiple, joins_scales = 4.5, True, BLOCK, True

    def buffers(self, count: int, shape: tuple[int, int]) -> Sizes:
        high, wide = shape[0], -(-shape[1] // BLOCK)
        data, scales = (count, high, wide * BLOCK // 2), (count, high, wide)
        return {"data": (torch.uint8, data), "scales": (torch.uint8, scales), "fractions": (torch.float32, (count, 2))}

    def quantize(self, weight: Tensor, row: Rows, largest: Tensor | None = None, keep: bool = False) -> None:
        """Quantize as `Format.quantize` says, by the formulas of compressed-tensors.

        The global scale 448 · 6 / `largest` brings the largest scale of a block to 448, and the scale of a block its
        largest magnitude to 6. With `keep` it stays as well, if all weights fit.
        """
        data, scales, fraction = row["data"], row["scales"], row["fractions"]
        rows, columns = weight.shape
        largest = largest_of(weight) if largest is None else largest
        new = torch.stack([torch.ones_like(largest), torch.where(largest > 0, LARGEST * E2M1[-1] / largest, 1)])
        if keep:  # without asking the device, so that fake tensors take the same way
            stays = largest <= LARGEST * E2M1[-1] * fraction[0] / fraction[1] * SLACK
            new = torch.where(stays, fraction, new)
        fraction.copy_(new)
        over, under = fraction
        high = max(1, AT_ONCE // columns)
        for first in range(0, rows, high):
            blocks = pad(weight[first : first + high].float(), (0, -columns % BLOCK)).unflatten(1, (-1, BLOCK))
            wanted = under * (blocks.abs().amax(-1) / E2M1[-1]) / over
            rounded = wanted.clamp_(_SMALLEST_FP8, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
            if keep:  # as integers, positive scales are in the same order
                rounded = torch.maximum(rounded, scales[first : first + high] * stays)
            scales[first : first + high].copy_(rounded)
            of_blocks = rounded.view(torch.float8_e4m3fn).float() * over / under
            data[first : first + high].copy_(e2m1_codes(blocks / of_blocks[..., None]).flatten(1))

    def dequantize(self, stored: Rows, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        weights: Tensor = dequantize_nvfp4(stored["data"], stored["scales"], stored["fractions"], shape[1], dtype)
        return weights

    def published(self, method: str, settings: Settings) -> SourceQuantization | None:
        only: tuple[str, ...] = ()
        if method == "compressed-tensors":
            scheme = scheme_of(settings)
            if scheme is None or scheme.format != "nvfp4-pack-quantized" or scheme.kind[:2] != (4, "float"):
                return None
            only = scheme.only
        elif method != "modelopt" or settings.get("quant_algo") not in ("NVFP4", "W4A16_NVFP4"):
            return None
        return SourceQuantization(method, "nvfp4", gate_up_apart=True, left_out=left_out(settings), only=only)

    def layout(self, *shape: int) -> Sizes:
        """compressed-tensors': codes, the blocks' scales, and the global scale."""
        rows, columns = shape
        return {
            "packed": (torch.uint8, (rows, columns // 2)),
            "scale": (torch.float8_e4m3fn, (rows, columns // BLOCK)),
            "global_scale": (torch.float32, (1,)),
        }

    def settings(self, others: list[str]) -> dict[str, Any]:
        groups = {"strategy": "tensor_group", "group_size": BLOCK}
        return compressed_tensors("nvfp4-pack-quantized", others, num_bits=4, type="float", **groups)
