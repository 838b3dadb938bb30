"""bitsandbytes: quick import, shared tables of 8-bit optimizers, CPU dequantization corrected, paged states.

Import bitsandbytes' names from here: its own import loads torch's compiler, which takes two seconds (`_lazily`).
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


def _lazily(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `torch.compile(function, **options)`, but load the compiler only when the function is first called."""
    compiled = functools.cache(functools.partial(torch.compile, function, **options))
    return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))


with patch.object(torch, "compile", _lazily):
    import bitsandbytes.autograd  # defines its operators

# names that others import from here
from bitsandbytes import functional as functional  # noqa: E402
from bitsandbytes import optim as optim  # noqa: E402
from bitsandbytes.functional import get_paged  # noqa: E402
from bitsandbytes.nn import Linear4bit as Linear4bit  # noqa: E402
from bitsandbytes.nn import Params4bit as Params4bit  # noqa: E402
from bitsandbytes.utils import unpack_tensor_to_dict as unpack_tensor_to_dict  # noqa: E402

SMALLEST_PAGED = 100_000
"""Number of elements from which a state of a paged optimizer is in paged memory."""
_PAGED = ("state1", "state2")


def share_tables(optimizer: Any, tables: dict[str, Tensor]) -> None:
    """Make 8-bit optimizers share their quantization tables; call it with the same `tables` for each optimizer.

    An empty `tables` is filled with the tables of `optimizer`; otherwise it replaces them. Without it every optimizer
    has its own tables, which adds up where each parameter has an optimizer, as with `fused_backward`.
    """
    if not tables:
        tables.update(optimizer.name2qmap)
    optimizer.name2qmap = tables


def prepare_4bit(linear: Linear4bit) -> None:
    """Make a 4-bit linear layer trainable on a CPU.

    bitsandbytes would repack the weight in place at the first evaluation on CPUs with AVX-512 bf16, after which no
    gradient is recorded; this is switched off. Dequantization is corrected by `mend_dequantize_4bit`.
    """
    linear.support_avx512bf16_for_cpu = False
    mend_dequantize_4bit()


@functools.cache
def mend_dequantize_4bit() -> tuple[torch.library.Library, Any]:
    """Replace bitsandbytes' CPU kernel of `dequantize_4bit` in this process; done once, later calls return the same.

    The kernel of bitsandbytes 0.50.2 looks a weight's scale up by row and column as if each row began a new block, so
    scales are wrong where the row length is not a multiple of the block size (its finding has the numbers).
    It is right for a flat shape, which the replacement passes to it in this case. Return the torch library that holds
    the replacement, and a function that calls the original kernel.
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
        warnings.simplefilter("ignore", UserWarning)  # torch warns about an overridden kernel
        library.impl("dequantize_4bit", dequantize_4bit, "CPU", allow_override=True)
    return library, functools.partial(upstream.call_boxed, keys)


def paged(optimizer: Any, parameter: Tensor) -> Iterator[Tensor]:
    """Yield the optimizer states of a parameter that bitsandbytes keeps in CUDA managed ("paged") memory.

    Yields nothing if the optimizer is not paged or the parameter has fewer than `SMALLEST_PAGED` elements, as in
    bitsandbytes' `get_state_buffer`.
    """
    if getattr(optimizer, "is_paged", False) and parameter.numel() >= SMALLEST_PAGED:
        yield from (tensor for key, tensor in optimizer.state.get(parameter, {}).items() if key in _PAGED)


def update(optimizer: Any) -> None:
    """Run one step of a bitsandbytes optimizer, synchronizing the GPU only if its states are paged.

    bitsandbytes makes the host wait for the GPU after each parameter. Only paged states need that, because host and GPU
    both access them.
    """
    if getattr(optimizer, "is_paged", True):
        optimizer.step()
        return
    with patch.object(bitsandbytes.optim.optimizer, "sync_gpu", lambda _: None):
        optimizer.step()


def page(optimizer: Any) -> None:
    """Move the large states of a paged optimizer, which were read from a checkpoint, into paged memory."""
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if parameter.is_cuda and key in _PAGED and value.numel() >= SMALLEST_PAGED:
                paged = get_paged(*value.shape, dtype=value.dtype, device=parameter.device)
                optimizer.page_mng.paged_tensors.append(paged)
                values[key] = paged.copy_(value)
