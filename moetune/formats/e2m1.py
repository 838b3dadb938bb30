"""E2M1: floating-point codes of 4 bits, two in a byte, for MXFP4 and NVFP4."""

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values of the codes 0 to 7; 8 to 15 are their negatives
LEVELS = (*E2M1, *(-value for value in E2M1))  # values of all 16 codes


def _middles() -> list[float]:
    """Return the largest float32 magnitude that rounds to each code but the last, ties to the even code."""
    levels = torch.tensor(E2M1)
    middles = (levels[:-1] + levels[1:]) / 2
    middles[1::2] = torch.nextafter(middles[1::2], levels[:-1][1::2])  # ties with the even code above round up
    return middles.tolist()


_MIDDLES = _middles()


def e2m1_codes(scaled: Tensor) -> Tensor:
    """Round float32 values [..., n] to E2M1; return two codes per byte, [..., n / 2] uint8, the first in the low bits.

    Magnitudes above 6 become 6.
    """
    codes = torch.bucketize(scaled.abs(), scaled.new_tensor(_MIDDLES), out_int32=True).to(torch.uint8)
    codes |= scaled.signbit().to(torch.uint8) << 3
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    packed: Tensor = low | high << 4
    return packed
