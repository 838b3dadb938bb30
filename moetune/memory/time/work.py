"""Work of a GPU operation: FLOPs, bytes moved, launches, from its arguments.

FLOPs are counted for matrix products and attention, with the formulas of `torch.utils.flop_counter`; causal attention
counts as half. Bytes are those of the inputs and outputs, each read or written once and caches ignored; an operation
that looks up rows reads only these rows. A launch is an operation that the host asks the GPU for.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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

WorkPart = Literal[
    "experts", "attention", "router", "dense_mlp", "head_and_loss", "rest", "dequantization", "optimizer", "transfers",
    "host",
]  # fmt: skip
"""Parts of a step. `rest`: embedding, norms, residuals. `host`: computed on the CPU, such as offloaded updates."""

aten = torch.ops.aten
_GEMM_4BIT = torch.ops.bitsandbytes.gemm_4bit.default


@dataclass(frozen=True)
class Work:
    """Work of one or more operations.

    Attributes:
        flops: FLOPs of matrix products and attention in 16 bits.
        flops32: the same in float32, for which tensor cores are not used.
        bytes: bytes read and written.
        launches: operations that the host asks the GPU for. May be fractional where one updates many tensors.
        own_launches: those of them that Python launches (the experts' kernels, bitsandbytes), not torch's C++.
        synchronizations: times that the host waits for the GPU.
        copied: bytes copied between host and GPU.
    """

    flops: float = 0
    flops32: float = 0
    bytes: float = 0
    launches: float = 0
    own_launches: float = 0
    synchronizations: float = 0
    copied: float = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(add, vars(self).values(), vars(other).values()))

    def to_json(self) -> dict[str, int]:
        """Return all fields, rounded to integers."""
        return {name: round(number) for name, number in vars(self).items()}


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
    by_part: dict[WorkPart, list[float]] = {}
    for record in done:  # thousands, so numbers are added and not objects
        times = record.times * (1 + more if record.micro_step == 1 else 1)
        numbers = [times * number for number in vars(record.work).values()]
        before = by_part.get(record.part)
        by_part[record.part] = numbers if before is None else [*map(add, before, numbers)]
    return {part: Work(*numbers) for part, numbers in by_part.items()}


# --- One operation ------------------------------------------------------------------------------------------------


def works(func: Any, args: Any, kwargs: Any, out: Any, capability: Capability) -> Iterator[tuple[Work, Tensor | None]]:
    """Yield the work of one operation, whose result is `out`, on a GPU of this compute capability.

    The work comes with a tensor that decides where it counts: whether on host or GPU, and for which decoder layer. An
    update of several tensors at once yields the work of each of them.
    """
    if _does_nothing(func):
        return
    own = func.namespace != "aten"
    if args and isinstance(args[0], (list, tuple)) and _written(func):  # weights, gradients and states of an update
        lists = [argument for argument in args if isinstance(argument, (list, tuple)) and argument]
        for group in zip(*lists, strict=False):
            yield Work(bytes=2 * sum(map(size_of, group)), launches=1 / 30), group[0]  # of 30 tensors at most
        return
    tensors, fresh = tensors_in((args, *kwargs.values())), tensors_in((out,))
    moved, launches = _moved(func, args, kwargs, tensors, fresh), 1
    if func is _GEMM_4BIT:  # dequantizes the weight, then multiplies by it
        moved, launches = moved + 2 * args[2][0] * args[2][1] * tensors[0].element_size(), 2
    elif func._opname == "grouped_mm" and grouped.kernel_of(capability, *args[:2]) is None:
        launches = sum(map(bool, args[3]))  # one for each expert that has rows
    flops = _flops(func, args, kwargs, out)
    flops16, flops32 = (0.0, flops) if flops and tensors[0].dtype == torch.float32 else (flops, 0.0)
    work = Work(flops16, flops32, moved, launches, launches if own else 0)
    yield work, tensors[0] if tensors else None


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among an operation's arguments or results, in order, those in lists and tuples included."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_in(value)
    return tensors


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


# --- Floating point operations --------------------------------------------------------------------------------------


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return the FLOPs of an operation; 0 if it is neither a matrix product nor attention."""
    if (own := _FLOPS.get(func)) is not None:
        return own(*args, **kwargs)
    packet = func._overloadpacket
    known = flop_registry.get(_IN_PLACE.get(packet, packet))
    if known is None:
        return 0
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    flops: float = known(*args, **kwargs, out_val=out) / (2 if named.get("is_causal") else 1)
    return flops


# In-place product -> the product with the same FLOPs, which torch's registry has.
_IN_PLACE = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}


def _grouped(a: Tensor, b: Tensor, *_: Any) -> float:
    """Return the FLOPs 2·N·p·q of a grouped product of `a` and `b`: [N, p] by [C, p, q], or [p, N] by [N, q]."""
    return 2.0 * a.numel() * b.shape[-1]


def _low_rank_product(out: Tensor, rows: Tensor, matrices: Tensor, narrow: Tensor, second: Tensor, *_: Any) -> float:
    """Return the FLOPs 2·N·(p·q + P·q'·r) of `low_rank_product_`, which adds LoRA's second product to N rows of C
    experts times their weights: `rows` [N, p], `matrices` [C, p, q], factors B of P projections [C, P, q', r]."""
    return _grouped(rows, matrices) + 2.0 * len(rows) * second[0].numel()


def _low_rank(x: Tensor, first: Tensor, second: Tensor | None, *_: Any) -> float:
    """Return the FLOPs 2·N·P·r·(p + q) of the operator `low_rank`, which applies LoRA factors to rows of C experts.

    x is [N, p] or [N, P, p], `first` [C, P, r, p] and `second` [C, P, q, r]. If `second` is None, q is 0.
    """
    return 2.0 * len(x) * first[0, ..., 0].numel() * (first.shape[-1] + (0 if second is None else second.shape[-2]))


def _low_rank_gradients(
    narrow_out: Tensor, x: Tensor, narrow_in: Tensor, dout: Tensor, of_A: Tensor | None, of_B: Tensor | None, *_: Any
) -> float:
    """Return the FLOPs 2·n·(p + q) of both LoRA factors' gradients, for n elements in `narrow_out`, x [..., p], dout
    [..., q]; those of a gradient that is skipped do not count."""
    wide = (0 if of_A is None else x.shape[-1]) + (0 if of_B is None else dout.shape[-1])
    return 2.0 * narrow_out.numel() * wide


def _varlen(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *rest: Any, **_: Any) -> float:
    """Return an upper bound of the FLOPs of causal attention over packed documents, T·h·(L/2)·2·(d_query + d_value).

    query is [T, h, d_query] for T tokens and h heads. L is the length of the longest document, the first int in `rest`.
    """
    longest = next(number for number in rest if isinstance(number, int) and not isinstance(number, bool))
    return query.shape[0] * longest / 2 * query.shape[1] * 2.0 * (query.shape[-1] + value.shape[-1])


# Operators that torch's registry lacks -> function of their arguments that returns the FLOPs.
_FLOPS: dict[Any, Callable[..., float]] = {
    torch.ops.moetune.grouped_mm.default: _grouped,
    torch.ops.moetune.low_rank.default: _low_rank,
    torch.ops.moetune.low_rank_product_.default: _low_rank_product,
    torch.ops.moetune.low_rank_gradients_.default: _low_rank_gradients,
    _GEMM_4BIT: lambda rows, quantized, shape, *_, **__: 2.0 * rows.numel() // rows.shape[-1] * shape[0] * shape[1],
    aten._flash_attention_forward.default: _varlen,
    # five products instead of two; after the gradient come query, key and value, then out and lse, then the starts
    aten._flash_attention_backward.default: lambda _, q, k, v, out, lse, *rest, **__: 2.5 * _varlen(q, k, v, *rest),
}


# --- Bytes ----------------------------------------------------------------------------------------------------------


def _moved(func: Any, args: Any, kwargs: Any, tensors: list[Tensor], fresh: list[Tensor]) -> float:
    """Return the bytes that an operation reads and writes. `tensors` are its tensor arguments, `fresh` its results.

    Where rows of a tensor are looked up or written, only these rows count. An argument that is changed in place is read
    and written; one that is overwritten is only written.
    """
    name, read = func._opname, sum(map(size_of, tensors))
    if name in _LOOKS_UP:  # reads only the rows that it returns
        return 2 * sum(map(size_of, fresh)) + read - size_of(tensors[0])
    if name in _PUTS:  # reads rows and indices, writes the rows; additions read the target's rows too
        return read - size_of(tensors[0]) + max(map(size_of, tensors[1:])) * (2 if "add" in name else 1)
    written = _written(func)
    if not written:
        return read + sum(map(size_of, fresh))
    if name in _OVERWRITES or func._overloadname == "out":
        return read
    targets = [args[index] if index < len(args) else kwargs.get(name) for index, name in written]
    return read + sum(map(size_of, tensors_in(targets)))


# Operators that read rows of a tensor; that write rows of it; and whose written argument is not read before.
_LOOKS_UP = {"embedding", "index", "index_select", "gather", "gather_rows"}
_PUTS = {"index_copy_", "index_add_", "index_put_", "scatter_", "scatter_add_", "add_rows_"}
_OVERWRITES = {"copy_", "zero_", "fill_", "uniform_", "normal_", "sum_rows_"}
_OVERWRITES |= {"low_rank", "low_rank_product_", "low_rank_gradients_"}


def written_by(func: Any, args: Any) -> Tensor | None:
    """Return the first argument that an operation writes in place; None if there is none or it is no tensor."""
    written = _written(func)
    changed = args[written[0][0]] if written and written[0][0] < len(args) else None
    return changed if isinstance(changed, Tensor) else None


@cache
def _written(func: Any) -> list[tuple[int, str]]:
    """Return (position, name) of the arguments that an operator writes in place, from its schema."""
    arguments = enumerate(func._schema.arguments)
    return [(n, arg.name) for n, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write]
