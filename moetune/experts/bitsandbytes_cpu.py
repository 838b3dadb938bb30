"""bitsandbytes' `dequantize_4bit` on a CPU, mended. docs/reference/upstream.md has the bug and how to see it.

The kernel of 0.50.2 finds a weight's scale by its row and column, as if each row began a block. Where the length of a
row is no multiple of the block it takes another's scale. Quantization goes by blocks of the flat matrix, and for a flat
shape the kernel is exact. All paths lead here: `QuantizedExperts`, `Linear4bit` with and without gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import prod

import bitsandbytes  # noqa: F401  its import registers the kernels
import torch
from torch import Tensor

_NAME = "bitsandbytes::dequantize_4bit"
_upstream = torch.library.get_kernel(_NAME, "CPU")
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def _dequantize_4bit(
    data: Tensor, absmax: Tensor, blocksize: int, quant_type: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    if shape[-1] % blocksize == 0:
        return _upstream.call_boxed(_CPU, data, absmax, blocksize, quant_type, shape, dtype)
    return _upstream.call_boxed(_CPU, data, absmax, blocksize, quant_type, [prod(shape)], dtype).view(shape)


_library = torch.library.Library("bitsandbytes", "IMPL")  # the kernel is ours as long as this lives
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # that a kernel is overridden, which is what we are here for
    _library.impl("dequantize_4bit", _dequantize_4bit, "CPU", allow_override=True)
