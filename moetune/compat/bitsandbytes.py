"""bitsandbytes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any
from unittest.mock import patch

import bitsandbytes.optim.optimizer
import torch
from bitsandbytes.functional import get_paged
from bitsandbytes.nn import Linear4bit
from torch import Tensor

SMALLEST_PAGED = 100_000
"""Elements of a state; smaller ones are in ordinary memory."""
_PAGED = ("state1", "state2")


def share_tables(optimizer: Any, tables: dict[str, Tensor]) -> None:
    """Let 8-bit optimizers have their quantization tables in common; the first one's become those of all.

    Each makes its own, and where gradients are freed as they come each parameter has an optimizer.
    """
    if not tables:
        tables.update(optimizer.name2qmap)
    optimizer.name2qmap = tables


def prepare_4bit(linear: Linear4bit) -> None:
    """Make a 4-bit layer usable on a CPU.

    Its weight must not be repacked: on CPUs with AVX-512 bf16 that happens in place at the first evaluation, after
    which no gradient is recorded. And it must be dequantized correctly (`mend_dequantize_4bit`).
    """
    linear.support_avx512bf16_for_cpu = False
    mend_dequantize_4bit()


@functools.cache
def mend_dequantize_4bit() -> tuple[torch.library.Library, Any]:
    """Replace bitsandbytes' `dequantize_4bit` on a CPU for this process; return what holds the new kernel, and the old.

    The kernel of 0.50.2 finds a weight's scale by its row and column, as if each row began a block, and so uses wrong
    scales where rows are not a multiple of the block size (docs/reference/upstream.md). For a flat shape it is right.
    """
    upstream = torch.library.get_kernel("bitsandbytes::dequantize_4bit", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def dequantize_4bit(
        data: Tensor, absmax: Tensor, blocksize: int, quant_type: str, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        flat = shape if shape[-1] % blocksize == 0 else [prod(shape)]
        return upstream.call_boxed(keys, data, absmax, blocksize, quant_type, flat, dtype).view(shape)

    library = torch.library.Library("bitsandbytes", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about overriding a kernel
        library.impl("dequantize_4bit", dequantize_4bit, "CPU", allow_override=True)
    return library, functools.partial(upstream.call_boxed, keys)


def paged(optimizer: Any, parameter: Tensor) -> Iterator[Tensor]:
    """The states of a parameter that are in managed memory on a GPU: `get_state_buffer`."""
    if getattr(optimizer, "is_paged", False) and parameter.numel() >= SMALLEST_PAGED:
        yield from (tensor for key, tensor in optimizer.state.get(parameter, {}).items() if key in _PAGED)


def update(optimizer: Any) -> None:
    """One update. bitsandbytes lets the host wait for the device after each parameter, which only paged states need:
    theirs are read by both."""
    if getattr(optimizer, "is_paged", True):
        optimizer.step()
        return
    with patch.object(bitsandbytes.optim.optimizer, "sync_gpu", lambda _: None):
        optimizer.step()


def load_paged(optimizer: Any, state: dict[str, Any]) -> None:
    """`load_state_dict`, after which large states are in paged memory again: bitsandbytes loads them into a GPU's."""
    optimizer.load_state_dict(state, move_to_device=False)
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if not isinstance(value, Tensor):
                continue
            if parameter.is_cuda and key in _PAGED and value.numel() >= SMALLEST_PAGED:
                paged = get_paged(*value.shape, dtype=value.dtype, device=parameter.device)
                optimizer.page_mng.paged_tensors.append(paged)
                values[key] = paged.copy_(value)
            else:
                values[key] = value.to(parameter.device)
