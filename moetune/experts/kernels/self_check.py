"""A check that the experts' kernels compute the same as torch's operations on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moetune.experts.kernels import operators as kernels
from moetune.experts.kernels import rotary  # noqa: F401  defines its operators
from moetune.experts.quantized import QuantizedExperts

TOP_K, EXPERTS = 3, 5
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest accepted difference, relative to the largest value of a result; torch rounds more often in 16 bits."""


def differing(module: ModuleType, device: torch.device, dtype: torch.dtype, tokens: int = 80) -> list[str]:
    """Run every operator with a kernel in `module`, and return those that differ from torch's operations.

    Args:
        module: the kernels, with a function for each operator in `operators.REFERENCES` (triton_kernels.py).
        device: where to run.
        dtype: data type of the token rows, a key of `TOLERANCE`.
        tokens: number of token rows in the test inputs.

    Returns:
        One text for each differing call, with the operator's name and the largest difference relative to the largest
            value. Dequantization must be exact; other operators may differ by `TOLERANCE`.
    """
    found = []
    with torch.no_grad():
        for name, args in calls(device, dtype, tokens):
            one, other = (_results(run, args) for run in (getattr(module, name), kernels.REFERENCES[name]))
            # NaN if any difference is NaN
            off = float(torch.stack([_difference(*both) for both in zip(one, other, strict=True)]).max())
            if not off <= (0 if name.startswith("dequantize") else TOLERANCE[dtype]):
                found.append(f"{name} (off by {off:.1e} of the largest)")
    return found


def _results(run: Callable[..., Any], args: list[Any]) -> list[Tensor]:
    """Run an operator on copies of its arguments; return the tensors of its result and its arguments afterwards."""
    copies = [arg.clone(memory_format=torch.preserve_format) if torch.is_tensor(arg) else arg for arg in args]
    given = run(*copies)
    return [
        tensor for tensor in (*(given if isinstance(given, tuple) else [given]), *copies) if torch.is_tensor(tensor)
    ]


def _difference(one: Tensor, other: Tensor) -> Tensor:
    """Return the largest absolute difference, divided by the largest magnitude of `other`."""
    one, other = one.double(), other.double()
    return (one - other).abs().max() / other.abs().max().clamp_min(1e-30)


def calls(
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    *,
    hidden: int = 192,
    intermediate: int = 144,
    rank: int = 12,
) -> Iterator[tuple[str, list[Any]]]:
    """Yield (operator name, arguments) for each operator, with random inputs that are the same on every call.

    Row operators run for several experts, one of which has no rows, and for one expert alone.

    Args:
        device: where the argument tensors are.
        dtype: data type of the token rows.
        tokens: number of tokens.
        hidden: hidden size.
        intermediate: intermediate size of an expert.
        rank: rank of the low-rank factors.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    for double_quant in (True, False):
        stack = QuantizedExperts(2, (hidden, 64), "nf4", double_quant=double_quant)
        for number in range(2):
            stack.quantize_(number, torch.randn(hidden, 64, generator=generator))
        buffers: Mapping[str, Tensor] = {name: buffer.to(device) for name, buffer in stack.named_buffers()}
        nested = [buffers[name] if double_quant else None for name in ("nested_absmax", "nested_code", "offset")]
        yield "dequantize_nf4", [buffers["data"], buffers["absmax"], *nested, hidden * 64, dtype]

    int8, mxfp4 = (QuantizedExperts(2, (hidden, 96), storage) for storage in ("int8", "mxfp4"))
    for number in range(2):
        for stack in (int8, mxfp4):
            stack.quantize_(number, torch.randn(hidden, 96, generator=generator))
    of_rows = int8.data.flatten(0, 1), int8.absmax.flatten()
    yield "dequantize_int8", [*(tensor.to(device) for tensor in of_rows), dtype]
    of_blocks = mxfp4.data.flatten(), mxfp4.scales.flatten(), mxfp4.pairs
    yield "dequantize_mxfp4", [*(tensor.to(device) for tensor in of_blocks), dtype]

    chosen = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:TOP_K] for _ in range(tokens)]).flatten()
    counts = torch.bincount(chosen, minlength=EXPERTS).tolist()
    order, ends = torch.argsort(chosen, stable=True).to(device), torch.tensor([*accumulate(counts)], dtype=torch.int32)
    x, weights = drawn(tokens, hidden), drawn(tokens * TOP_K, dtype=torch.float32)
    inverse = torch.argsort(order).int()
    rows = drawn(tokens * TOP_K, hidden)
    yield "gather_rows", [x, order, TOP_K, torch.zeros_like(inverse)]
    yield "sum_rows_", [torch.zeros_like(x), rows, inverse, weights]
    of_first = slice(0, counts[0])
    yield "gather_rows", [x, order[of_first], TOP_K, None]
    yield "add_rows_", [x, rows[of_first], order[of_first], TOP_K, None]

    for gate in ((False, 1.0, 0.0), (True, 1.702, 1.5)):
        gate_up, dact = drawn(tokens * TOP_K, 2 * intermediate), drawn(tokens * TOP_K, intermediate)
        yield "gated", [gate_up, *gate]
        yield "gated_backward_", [gate_up, dact, weights, order, torch.zeros_like(weights), *gate]

    for parts, groups in ((1, (None, [len(rows)])), (2, (ends.to(device), counts))):
        experts = 1 if groups[0] is None else EXPERTS
        A, B = (drawn(experts, parts, *shape, dtype=torch.float32) for shape in ((rank, hidden), (intermediate, rank)))
        wide = drawn(len(rows), parts, intermediate) if parts > 1 else drawn(len(rows), intermediate)
        narrow = drawn(len(rows), parts, rank)
        yield "low_rank", [rows, A, B, wide, torch.zeros_like(wide), *groups, 0.5]
        yield "low_rank", [wide, B.mT, A.mT, rows, torch.zeros_like(rows), *groups, 0.5]
        gradients = torch.zeros_like(A), torch.zeros_like(B)
        yield "low_rank_gradients_", [narrow, rows, narrow, wide, *gradients, weights, order, *groups, 0.5]

    heads = [drawn(2, tokens // 2, count, 2 * rank).transpose(1, 2) for count in (4, 1)]
    angles = [drawn(1, tokens // 2, 2 * rank) for _ in range(2)]
    norms, none = [drawn(2 * rank) for _ in range(2)], [None, None]
    for of_heads, kept in ((norms, heads), (none, none)):
        yield "rotate", [*heads, *angles, *of_heads, 1e-6]
        yield "rotate_backward", [*heads, *kept, *angles, *of_heads, 1e-6]
