"""Rounding of weights to floating-point formats with blocks of scales: FP8, NVFP4 and MXFP4.

Weights are rounded to the nearest value, ties to even. Temporary tensors hold about `INT8_AT_ONCE` weights at a time.
Each function overwrites its arguments `data` (codes) and `scales`; scales of 8 bits are given as uint8.

With `keep`, `scales` hold those of an earlier quantization, and a block's scale stays unless a weight is too large for
it, so that weights that hardly changed are rounded to the codes that they had.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from moetune.config.schema import FP8_BLOCK, NV_BLOCK
from moetune.kernels.operators import E2M1, INT8_AT_ONCE, MX_BLOCK

_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
SLACK = 1 + 2**-5
"""Factor by which a block's largest magnitude may exceed the range of a scale that stays: less than half a step."""
_SMALLEST_FP8 = torch.finfo(torch.float8_e4m3fn).smallest_normal / 8


def round_to_fp8(weight: Tensor, data: Tensor, scales: Tensor, *, keep: bool = False) -> None:
    """Quantize a matrix [R, C] to FP8 (E4M3), with a scale for each block of 128 × 128 weights.

    Blocks at the right and lower edges may be cut off. The scale brings the block's largest magnitude to 448, the
    largest value of FP8. The result is bit for bit that of transformers' `Fp8Quantize`, which refuses blocks that are
    cut off.

    Args:
        data: [R, C] uint8, overwritten with the bits of the codes.
        scales: [⌈R / 128⌉, ⌈C / 128⌉] float32, overwritten with what the codes are to be multiplied by.
        keep: as in the module's docstring.
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
    """Quantize a matrix [R, C] to NVFP4, with B = ⌈C / 16⌉ blocks in a row, by the formulas of compressed-tensors.

    The global scale 448 · 6 / `largest` brings the largest scale of a block to 448, and the scale of a block its
    largest magnitude to 6.

    Args:
        data: [R, 8·B] uint8, overwritten with two codes per byte, the first in the low bits.
        scales: [R, B] uint8, overwritten with the bits of the blocks' E4M3 scales.
        fraction: [2] float32, numerator and denominator of the factor of all scales; overwritten with 1 and the global
            scale.
        largest: a magnitude, at least that of every weight, as where several matrices share a global scale; by default
            the matrix's own.
        keep: as in the module's docstring; `fraction` is then read and stays too, and `largest` is not used.
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
    """Quantize a flat tensor of n weights to MXFP4, in ⌈n / 32⌉ blocks.

    The scale of a block of 32 weights is the power of two that brings its largest magnitude into [4, 8); scaled
    magnitudes above 6 become 6 (OCP Microscaling Formats 1.0, section 6.3).

    Args:
        data: [16 · ⌈n / 32⌉] uint8, overwritten with two codes per byte, the first in the low bits.
        scales: [⌈n / 32⌉] uint8, overwritten with the exponent of each scale, plus 127.
        keep: as in the module's docstring.
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
    """Round float32 values [..., n] to E2M1; return two codes per byte, [..., n / 2] uint8, the first in the low bits.

    Magnitudes above 6 become 6.
    """
    levels = scaled.new_tensor(E2M1)
    middles = (levels[:-1] + levels[1:]) / 2
    # ties between an odd code and the even one above it round up
    middles[1::2] = torch.nextafter(middles[1::2], levels[:-1][1::2])
    codes = torch.bucketize(scaled.abs(), middles, out_int32=True).to(torch.uint8)
    codes |= scaled.signbit().to(torch.uint8) << 3
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4
