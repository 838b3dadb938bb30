"""Rounding of weights to floating-point formats with blocks of scales: FP8, NVFP4 and MXFP4.

Weights are rounded to the nearest value, ties to even. Temporary tensors hold about `INT8_AT_ONCE` weights at a time.

With `keep`, a block's scale stays what it was if no weight is too large for it, so that weights of a quantized matrix
that hardly change are rounded to what they were.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from moetune.config.schema import FP8_BLOCK, NV_BLOCK
from moetune.experts.kernels.operators import E2M1, INT8_AT_ONCE, MX_BLOCK

_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
SLACK = 1 + 2**-5
"""How much the largest magnitude may exceed the range of a scale that is kept: less than half a step of FP8."""
_SMALLEST_FP8 = torch.finfo(torch.float8_e4m3fn).smallest_normal / 8


def round_to_fp8(weight: Tensor, data: Tensor, scales: Tensor, *, keep: bool = False) -> None:
    """Quantize a matrix [R, C] to FP8 (E4M3) in blocks of `FP8_BLOCK` rows and columns, the last of which may be cut
    off. The scale brings the block's largest magnitude to 448, the largest value; bit for bit transformers'
    `Fp8Quantize`, which takes no blocks that are cut off.

    Writes the codes to `data` [R, C] uint8, and to `scales` [⌈R / 128⌉, ⌈C / 128⌉] float32 what they are multiplied by.
    """
    rows, columns = weight.shape
    high = FP8_BLOCK * max(1, INT8_AT_ONCE // columns // FP8_BLOCK)
    for first in range(0, rows, high):
        part = weight[first : first + high].float()
        count = len(part)
        blocks = pad(part, (0, -columns % FP8_BLOCK, 0, -count % FP8_BLOCK))
        blocks = blocks.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))  # [r, 128, c, 128]
        largest = blocks.abs().amax((1, 3))
        factors = torch.where(largest > 0, _LARGEST_FP8 / torch.where(largest > 0, largest, 1), 1)
        stored = scales[first // FP8_BLOCK :][: len(factors)]
        if keep:
            fits = largest <= _LARGEST_FP8 * stored * SLACK
            factors = torch.where(fits, 1 / stored, factors)
            stored.copy_(torch.where(fits, stored, 1 / factors))
        else:
            stored.copy_(1 / factors)
        codes = (blocks * factors[:, None, :, None]).clamp_(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)
        codes = codes.view(torch.uint8).flatten(0, 1).flatten(1)
        data[first : first + high].copy_(codes[:count, :columns])


def round_to_nvfp4(
    weight: Tensor,
    data: Tensor,
    scales: Tensor,
    fraction: Tensor,
    *,
    largest: Tensor | None = None,
    keep: bool = False,
) -> None:
    """Quantize a matrix [R, C] to NVFP4, by the formulas of compressed-tensors: the global scale 448 · 6 / `largest`
    brings the largest scale to 448, and a block's scale its largest magnitude to 6.

    Args:
        data, scales, fraction: one matrix of each argument of `dequantize_nvfp4`; overwritten. The numerator is 1.
        largest: a magnitude, at least that of every weight; by default the largest.
        keep: the fraction stays too.
    """
    rows, columns = weight.shape
    if not keep:
        largest = _largest(weight) if largest is None else largest
        fraction[0] = 1
        fraction[1] = torch.where(largest > 0, _LARGEST_FP8 * E2M1[-1] / largest, 1)
    over, under = fraction
    high = max(1, INT8_AT_ONCE // columns)
    for first in range(0, rows, high):
        blocks = pad(weight[first : first + high].float(), (0, -columns % NV_BLOCK)).unflatten(1, (-1, NV_BLOCK))
        wanted = under * (blocks.abs().amax(-1) / E2M1[-1]) / over
        rounded = wanted.clamp_(_SMALLEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn).view(torch.uint8)
        if keep:  # as integers, positive scales are in the same order
            rounded = torch.maximum(rounded, scales[first : first + high])
        scales[first : first + high].copy_(rounded)
        of_blocks = rounded.view(torch.float8_e4m3fn).float() * over / under
        data[first : first + high].copy_(_e2m1_codes(blocks / of_blocks[..., None]).flatten(1))


def _largest(weight: Tensor) -> Tensor:
    """Return the largest magnitude of a tensor in float32, without a copy of its size."""
    low, high = weight.aminmax()
    return torch.maximum(low.abs(), high.abs()).float()


def round_to_mxfp4(weights: Tensor, data: Tensor, scales: Tensor, *, keep: bool = False) -> None:
    """Quantize a flat tensor of weights to MXFP4, writing codes to `data` and exponents + 127 to `scales`.

    The scale of a block of 32 weights is the power of two that brings its largest magnitude into [4, 8); scaled
    magnitudes above 6 become 6 (OCP Microscaling Formats 1.0, section 6.3).
    """
    for first in range(0, len(weights), INT8_AT_ONCE):
        part = weights[first : first + INT8_AT_ONCE].float()
        if lacking := -len(part) % MX_BLOCK:
            part = pad(part, (0, lacking))
        blocks = part.view(-1, MX_BLOCK)
        exponents = (torch.frexp(blocks.abs().amax(1)).exponent - 3).clamp_(-127, 127)
        of_blocks = scales[first // MX_BLOCK :][: len(blocks)]
        if keep:
            exponents = torch.maximum(exponents, of_blocks.to(torch.int32) - 127)
        data[first // 2 :][: len(part) // 2].copy_(_e2m1_codes(torch.ldexp(blocks, -exponents[:, None])).flatten())
        of_blocks.copy_(exponents + 127)


def _e2m1_codes(scaled: Tensor) -> Tensor:
    """Round float32 values [..., n] to E2M1; return two codes per byte, [..., n / 2] uint8, the first in the low
    bits. Magnitudes above 6 become 6."""
    levels = scaled.new_tensor(E2M1)
    middles = (levels[:-1] + levels[1:]) / 2
    # ties between an odd code and the even one above it round up
    middles[1::2] = torch.nextafter(middles[1::2], levels[:-1][1::2])
    codes = torch.bucketize(scaled.abs(), middles, out_int32=True).to(torch.uint8)
    codes |= scaled.signbit().to(torch.uint8) << 3
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4
