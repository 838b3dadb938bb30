"""Work of single GPU operations: FLOPs, bytes moved and kernel launches, from an operator's arguments.

FLOPs are counted for matrix products and attention, with the formulas of `torch.utils.flop_counter`; causal attention
counts as half. Bytes are those of the inputs and outputs, each read or written once and caches ignored; an operation
that looks up rows reads only these rows. A launch is one kernel or one cuBLAS call.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from operator import add
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

import moetune.compat.bitsandbytes  # noqa: F401  defines its operators
from moetune.adapt.attention import Capability
from moetune.kernels import grouped
from moetune.kernels import operators as kernels  # noqa: F401  defines its operators
from moetune.memory.time.occupancy import Product, idle, products

WorkPart = Literal[
    "experts",
    "attention",
    "router",
    "dense_mlp",
    "head_and_loss",
    "rest",
    "dequantization",
    "optimizer",
    "transfers",
    "host",
]
"""Parts of a step. `rest`: embedding, norms, residuals. `host`: computed on the CPU, such as offloaded updates."""

aten = torch.ops.aten
_GEMM_4BIT = torch.ops.bitsandbytes.gemm_4bit.default


@dataclass(frozen=True)
class Work:
    """Work of one or more operations.

    Attributes:
        flops: FLOPs of matrix products and attention in 16 bits.
        idle: FLOPs in 16 bits that idle multiprocessors could do meanwhile (occupancy.py).
        flops32: FLOPs of matrix products and attention in float32, for which tensor cores are not used.
        product_bytes: bytes read and written by matrix products and attention.
        bytes: bytes read and written by all other operations.
        launches: kernel launches. May be fractional where one kernel updates many tensors.
        synchronizations: times that the host waits for the GPU.
        copies, copied: number of copies between host and GPU, and their bytes.
    """

    flops: float = 0
    idle: float = 0
    flops32: float = 0
    product_bytes: float = 0
    bytes: float = 0
    launches: float = 0
    synchronizations: float = 0
    copies: float = 0
    copied: float = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(add, self.numbers(), other.numbers()))

    def __mul__(self, times: float) -> "Work":
        return Work(*(times * number for number in self.numbers()))

    def numbers(self) -> tuple[float, ...]:
        """Return all fields in order."""
        return tuple(vars(self).values())

    def to_json(self) -> dict[str, int]:
        """Return all fields, rounded to integers."""
        return {field.name: round(getattr(self, field.name)) for field in fields(self)}


READ = Work(synchronizations=1, copies=1)
"""Work of reading one number from the GPU on the host."""


class Done(NamedTuple):
    """A record of work that was done at one point of a traced step.

    Attributes:
        at: number of entries in the trace's log when the work was done.
        micro_step: counted from 0; None for work that a step does once, such as the optimizer's.
        part: the part of the step to which it counts.
        block: index of a storage in the trace's log whose decoder layer the work belongs to; None if unknown.
        times: number of executions, > 1 if a traced layer stands for several.
    """

    at: int
    step: int
    micro_step: int | None
    part: WorkPart
    work: Work
    block: int | None
    times: int = 1


def sums(done: Iterable[Done], more: int = 0) -> dict[WorkPart, Work]:
    """Add up the work of one step by part. `more` is the number of micro-steps that were not traced; each counts like
    the second (`micro_step` 1)."""
    found: dict[WorkPart, list[float]] = {}
    for one in done:
        times = one.times * (1 + more if one.micro_step == 1 else 1)
        numbers = one.work.numbers() if times == 1 else (one.work * times).numbers()
        before = found.get(one.part)
        found[one.part] = list(numbers if before is None else map(add, before, numbers))
    return {part: Work(*numbers) for part, numbers in found.items()}


# --- One operation ------------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """Part of an operation's work.

    Attributes:
        of: tensor that decides where the work counts: whether it runs on host or GPU, and for which decoder layer.
        part: the part of the step, if the operator alone decides it; else None.
    """

    work: Work
    of: Tensor | None
    part: WorkPart | None = None


def works(
    func: Any, args: Any, kwargs: Any, out: Any, capability: Capability, multiprocessors: int | None = None
) -> Iterator[Share]:
    """Yield the work of one operation, whose result is `out`, on a GPU of this compute capability, which decides how
    many kernels are launched.

    A fused optimizer update of several tensors yields one share for each of them. Without `multiprocessors`, the GPU's
    number of multiprocessors, no FLOPs count as idle.
    """
    if _does_nothing(func):
        return
    if func in _PER_TENSOR:
        lists = [argument for argument in args if isinstance(argument, (list, tuple)) and argument]
        for weight, gradient, *states in zip(*lists, strict=False):
            size = 2 * sum(map(size_of, (weight, *states))) + size_of(gradient)
            yield Share(Work(bytes=size, launches=_share_of_a_launch(weight)), weight)
        return
    tensors, fresh = tensors_in((args, *kwargs.values())), tensors_in((out,))
    first = tensors[0] if tensors else None
    if func is _GEMM_4BIT:
        yield from _unpacked_product(args, kwargs, tensors, fresh, multiprocessors)
        return
    moved = _moved(func, args, kwargs, tensors, fresh)
    launches = _launches(func, args, kwargs, out, capability)
    if flops := _flops(func, args, kwargs, out):
        lost = 0.0
        if multiprocessors is not None:
            is_loop = func._opname == "grouped_mm" and grouped.kernel_of(capability, *args[:2]) is None
            lost = sum(idle(one, multiprocessors) for one in products(func._opname, args, is_loop))
        yield Share(_product(flops, lost, moved, launches, tensors[0]), first)
    else:
        yield Share(Work(bytes=moved, launches=launches), first, part_of(func))


def part_of(func: Any) -> WorkPart | None:
    """Return `dequantization` for an operator that counts as that in any module, else None."""
    return "dequantization" if func is not None and func._opname.startswith("dequantize") else None


def _product(flops: float, lost: float, moved: float, launches: float, of: Tensor) -> Work:
    if of.dtype == torch.float32:
        return Work(flops32=flops, product_bytes=moved, launches=launches)
    return Work(flops=flops, idle=lost, product_bytes=moved, launches=launches)


def _unpacked_product(
    args: Any, kwargs: Any, tensors: list[Tensor], fresh: list[Tensor], multiprocessors: int | None
) -> Iterator[Share]:
    """Yield the work of `gemm_4bit`: dequantize the weight, then multiply by it. `tensors` are its tensor arguments
    (rows, quantized weight, scales), `fresh` its results.

    Follows `_dequant_linear_fallback` in bitsandbytes/backends/cuda/ops.py, which is used for matrices of realistic
    sizes. Nested scales need two more kernels.
    """
    rows, shape = tensors[0], args[2]
    numel, is_nested = shape[0] * shape[1], any(tensor.dtype == torch.uint8 for tensor in tensors[2:])
    weight = numel * rows.element_size()
    scales = 4 * numel / 64 * (3 if is_nested else 0)
    of_quantized = sum(map(size_of, tensors[1:]))
    yield Share(
        Work(bytes=of_quantized + scales + weight, launches=3 if is_nested else 1), tensors[1], "dequantization"
    )
    moved = size_of(rows) + weight + sum(map(size_of, fresh))
    count = rows.numel() // rows.shape[-1]
    launch = Product([count], shape[0], [shape[1]], True)
    lost = 0.0 if multiprocessors is None else idle(launch, multiprocessors)
    yield Share(_product(2 * count * numel, lost, moved, 1, rows), rows)


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among an operation's arguments or results, in order, those in lists and tuples included."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


def size_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements, at most those of its storage: expanded dimensions count once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


# Names of operators that launch nothing on the GPU.
_FREE = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias", "alias",
    "lift_fresh", "detach", "detach_", "set_", "resize_", "_local_scalar_dense", "_record_function_enter_new",
    "_record_function_exit", "device", "is_pinned", "_efficientzerotensor",
}  # fmt: skip


@cache
def _does_nothing(func: Any) -> bool:
    """Return whether an operator does no work to count: it creates or views tensors, or communicates
    (parallel/messages.py)."""
    is_sent = func.namespace in ("c10d", "_c10d_functional")
    return is_sent or func.is_view or func._opname in _FREE or (func.namespace, func._opname) == ("aten", "split")


@cache
def is_product(func: Any) -> bool:
    """Return whether an operator is a matrix product or attention."""
    packet = _IN_PLACE.get(func._overloadpacket, func._overloadpacket)
    return func is _GEMM_4BIT or func in _FLOPS or packet in flop_registry


# --- Floating point operations --------------------------------------------------------------------------------------


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return the FLOPs of an operation; 0 if it is neither a matrix product nor attention."""
    own = _FLOPS.get(func)
    if own is not None:
        return own(*args, **kwargs)
    known = flop_registry.get(func._overloadpacket)
    if known is None:
        packet = _IN_PLACE.get(func._overloadpacket)
        known = None if packet is None else flop_registry[packet]
    if known is None:
        return 0
    return known(*args, **kwargs, out_val=out) / (2 if _is_causal(func, args, kwargs) else 1)


# In-place product -> the product with the same FLOPs, which torch's registry has.
_IN_PLACE = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an attention operator was called with `is_causal=True`."""
    place = _place(func, "is_causal")
    return place is not None and bool(args[place] if place < len(args) else kwargs.get("is_causal", False))


@cache
def _place(func: Any, name: str) -> int | None:
    """Return the position of the parameter called `name` in an operator's schema; None if it has none."""
    return next((n for n, argument in enumerate(func._schema.arguments) if argument.name == name), None)


def _grouped(a: Tensor, b: Tensor, *_: Any) -> float:
    """Return the FLOPs 2·N·p·q of a grouped product of `a` and `b`: [N, p] by [C, p, q], or [p, N] by [N, q]."""
    rows = a.shape[0] if b.dim() == 3 else a.shape[1]
    return 2.0 * rows * (a.shape[1] if b.dim() == 3 else a.shape[0]) * b.shape[-1]


def _low_rank_product(out: Tensor, rows: Tensor, matrices: Tensor, narrow: Tensor, second: Tensor, *_: Any) -> float:
    """Return the FLOPs 2·N·(p·q + P·q'·r) of `low_rank_product_`, which adds LoRA's second product to N rows of C
    experts times their weights: `rows` [N, p], `matrices` [C, p, q], factors B of P projections [C, P, q', r]."""
    return _grouped(rows, matrices) + 2.0 * len(rows) * second[0].numel()


def _low_rank(x: Tensor, first: Tensor, second: Tensor | None, *_: Any) -> float:
    """Return the FLOPs 2·N·P·r·(p + q) of the operator `low_rank`, which applies LoRA factors to rows of C experts.

    x is [N, p] or [N, P, p], `first` [C, P, r, p] and `second` [C, P, q, r]. If `second` is None, q is 0.
    """
    per_number = first.shape[-1] + (0 if second is None else second.shape[-2])
    return 2.0 * len(x) * first[0, ..., 0].numel() * per_number


def _low_rank_gradients(narrow_out: Tensor, x: Tensor, narrow_in: Tensor, dout: Tensor, *_: Any) -> float:
    """Return the FLOPs 2·n·(p + q) of both LoRA factors' gradients, for n elements in `narrow_out`, x [..., p], dout
    [..., q]."""
    return 2.0 * narrow_out.numel() * (x.shape[-1] + dout.shape[-1])


def _varlen(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *rest: Any, **_: Any) -> float:
    """Return an upper bound of the FLOPs of causal attention over packed documents, T·h·(L/2)·2·(d_query + d_value).

    query is [T, h, d_query] for T tokens and h heads. L is the length of the longest document, the first int in `rest`.
    """
    longest = next(number for number in rest if isinstance(number, int) and not isinstance(number, bool))
    return query.shape[0] * longest / 2 * query.shape[1] * 2.0 * (query.shape[-1] + value.shape[-1])


def _varlen_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    *rest: Any,
    **_: Any,
) -> float:
    """Return an upper bound of the FLOPs of the backward pass of causal attention over packed documents: 5/2 of those
    of forward, because it has five matrix products instead of two."""
    return 2.5 * _varlen(query, key, value, starts, *rest)


# Operators that torch's registry lacks -> function of their arguments that returns the FLOPs.
_FLOPS: dict[Any, Callable[..., float]] = {
    torch.ops.moetune.grouped_mm.default: _grouped,
    torch.ops.moetune.low_rank.default: _low_rank,
    torch.ops.moetune.low_rank_product_.default: _low_rank_product,
    torch.ops.moetune.low_rank_gradients_.default: _low_rank_gradients,
    aten._flash_attention_forward.default: _varlen,
    aten._flash_attention_backward.default: _varlen_backward,
}


# --- Bytes ----------------------------------------------------------------------------------------------------------


def _moved(func: Any, args: Any, kwargs: Any, tensors: list[Tensor], fresh: list[Tensor]) -> float:
    """Return the bytes that an operation reads and writes. `tensors` are its tensor arguments, `fresh` its results.

    Where rows of a tensor are looked up or written, only these rows count. An argument that is changed in place is read
    and written; one that is overwritten is only written.
    """
    name = func._opname
    if name in _LOOKS_UP:  # reads only the rows that it returns
        return 2 * sum(map(size_of, fresh)) + sum(map(size_of, tensors[1:]))
    if name in _PUTS:  # reads rows and indices, writes the rows; additions read the target's rows too
        return sum(map(size_of, tensors[1:])) + size_of(tensors[-1]) * (2 if "add" in name else 1)
    if name == "add_rows_":  # reads and writes as many rows of the target
        return sum(map(size_of, tensors[1:])) + 2 * size_of(tensors[1])
    written = _written(func)
    if not written:
        return sum(map(size_of, tensors)) + sum(map(size_of, fresh))
    targets = [args[n] if n < len(args) else kwargs.get(key) for n, key in written]
    changed = sum(map(size_of, tensors_in(targets)))
    return sum(map(size_of, tensors)) + (0 if name in _OVERWRITES or func._overloadname == "out" else changed)


# Operators that read rows of a tensor; that write rows of it; and whose written argument is not read before.
_LOOKS_UP = {"embedding", "index", "index_select", "gather", "gather_rows"}
_PUTS = {"index_copy_", "index_add_", "index_put_", "scatter_", "scatter_add_"}
_OVERWRITES = {"copy_", "zero_", "fill_", "uniform_", "normal_", "sum_rows_"}
_OVERWRITES |= {"low_rank", "low_rank_product_", "low_rank_gradients_"}


def written_by(func: Any, args: Any) -> Tensor | None:
    """Return the first argument that an operation writes in place; None if there is none or it is no tensor."""
    places = _written(func)
    changed = args[places[0][0]] if places and places[0][0] < len(args) else None
    return changed if isinstance(changed, Tensor) else None


@cache
def _written(func: Any) -> list[tuple[int, str]]:
    """Return (position, name) of the arguments that an operator writes in place, from its schema."""
    arguments = enumerate(func._schema.arguments)
    return [(n, one.name) for n, one in arguments if one.alias_info is not None and one.alias_info.is_write]


# --- Launches -------------------------------------------------------------------------------------------------------

# Fused optimizer updates, whose arguments are lists of tensors: weights, gradients, states.
_PER_TENSOR = {
    getattr(packet, overload)
    for packet in (aten._fused_adamw_, aten._fused_adam_, aten._fused_sgd_)
    for overload in packet.overloads()
    if not overload.endswith("out")
}


def _share_of_a_launch(tensor: Tensor) -> float:
    """Return the share of a kernel launch that one tensor of a fused optimizer update takes: a launch covers 320 chunks
    of 65,536 elements and at most 30 tensors (native/cuda/MultiTensorApply.cuh)."""
    return max(-(-tensor.numel() // 65536) / 320, 1 / 30)


def _launches(func: Any, args: Any, kwargs: Any, out: Any, capability: Capability) -> float:
    own = _LAUNCHES.get(func._opname)
    if own is None:
        return 1
    return own(args, kwargs, out, capability) if callable(own) else own


def _of_grouped(args: Any, kwargs: Any, out: Any, capability: Capability) -> float:
    """Return the launches of a grouped product: 2 with torch's kernel, 1 with Triton's, else 1 per expert with rows."""
    a, b, _, counts = args
    whose = grouped.kernel_of(capability, a, b)
    return sum(map(bool, counts)) if whose is None else {"torch": 2, "triton": 1}[whose]


def _of_copy(args: Any, kwargs: Any, out: Tensor, capability: Capability) -> float:
    """Return the launches of a copy: 0 if its bytes are copied unchanged (a memcpy), else 1."""
    source = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else args[0]
    alike = source.dtype == out.dtype and source.shape == out.shape and source.stride() == out.stride()
    return 0 if alike and _is_dense(source) else 1


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill a contiguous stretch of memory, in any order."""
    return tensor.numel() == 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def _of_sort(args: Any, kwargs: Any, out: Any, capability: Capability) -> float:
    """Return the launches that sort a vector [n]: 2 up to 4,096 elements (one block), else 3 and 1 for each byte (radix
    sort)."""
    return 2 if args[0].numel() <= 4096 else 3 + args[0].element_size()


def _of_joining(args: Any, kwargs: Any, out: Any, capability: Capability) -> float:
    """Return the launches of a concatenation: 0 for a single tensor, else 1."""
    return 1 if len(args[0]) > 1 else 0


def _of_flash_backward(args: Any, kwargs: Any, out: Any, capability: Capability) -> float:
    """Return the launches of flash attention's backward: 3, and with grouped heads 2 more to sum over query heads."""
    return 3 if args[1].shape[1] == args[2].shape[1] else 5


def _of_power(args: Any, kwargs: Any, out: Any, capability: Capability) -> float:
    """Return the launches of a power: 0 for the exponent 1, else 1."""
    exponent = args[1]
    return 0 if not isinstance(exponent, Tensor) and exponent == 1 else 1


def _of_product(args: Any, kwargs: Any, out: Any, capability: Capability) -> float:
    """Return the launches of a matrix product: 0 if one of the matrices is empty, else 1."""
    return 1 if args[-1].numel() and args[-2].numel() else 0


_LAUNCHES: Mapping[str, float | Callable[..., float]] = {
    "grouped_mm": _of_grouped,
    "_to_copy": _of_copy,
    "clone": _of_copy,
    "copy_": _of_copy,
    "sort": _of_sort,
    "sorted_positions": 2,
    "stack": _of_joining,
    "cat": _of_joining,
    "pow": _of_power,
    "mm": _of_product,
    "slice_backward": 2,
    "constant_pad_nd": 2,
    "topk": 2,
    "_softmax_backward_data": 2,
    "_flash_attention_backward": _of_flash_backward,
    "_scaled_dot_product_flash_attention_backward": _of_flash_backward,
}
"""Operator name -> its launches, where not 1: counted operation by operation with torch 2.11 for CUDA 13."""
