"""bitsandbytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import bitsandbytes.optim.optimizer
from bitsandbytes.functional import get_paged
from bitsandbytes.nn import Linear4bit
from torch import Tensor

SMALLEST_PAGED = 100_000
"""Elements of a state; smaller ones are in ordinary memory."""
_PAGED = ("state1", "state2")


def share_tables(optimizer: Any, tables: dict[str, Tensor]) -> None:
    """Lets 8-bit optimizers have their quantization tables in common; the first one's become those of all.

    Each makes its own, and where gradients are freed as they come each parameter has an optimizer.
    """
    if not tables:
        tables.update(optimizer.name2qmap)
    optimizer.name2qmap = tables


def keep_packing(linear: Linear4bit) -> None:
    """Stops a 4-bit layer from repacking its weight. On CPUs with AVX-512 bf16 it does so in place at the first
    evaluation, and from then on records no gradient."""
    linear.support_avx512bf16_for_cpu = False


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
