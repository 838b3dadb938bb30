"""Bytes that a rank sends in each torch.distributed collective, from the dispatched operation."""

import typing
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from moetune.compat.torch import process_group

Collective = Literal[
    "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "reduce", "broadcast", "point-to-point"
]
NAMESPACES = ("c10d", "_c10d_functional")
_SENDS_NOTHING = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_", "check_for_nan", "recv_"}


@dataclass(frozen=True)
class Message:
    """The bytes that this rank sends in one collective operation.

    Attributes:
        kind: a `Collective`, or the schema name of an operation that this file does not cover.
        group: torch's name of the process group; empty for an unknown operation.
        ranks: number of ranks n in the group.
        bytes: bytes that this rank sends with a ring algorithm: (n - 1)/n of the whole tensor, twice that for
            all-reduce; for all-to-all the rows for other ranks; for point-to-point the tensor; for reduce and broadcast
            the whole tensor, and 0 on the last rank of the ring. 0 for an unknown operation.
    """

    kind: Collective | str
    group: str
    ranks: int
    bytes: int

    @property
    def is_known(self) -> bool:
        """Whether `kind` is one of `Collective`, so that `bytes` is known."""
        return self.kind in typing.get_args(Collective)


def message(func: Any, args: Any) -> Message | None:
    """Return what this rank sends in a dispatched operation; None if it sends nothing, as in a barrier.

    `func` is the operator, from one of `NAMESPACES`, and `args` are its arguments. For an operation that this file does
    not cover, the message has its schema name as kind and 0 bytes.
    """
    match func._schema.name:
        case "c10d::allreduce_":
            return _ring("all-reduce", sum(tensor.nbytes for tensor in args[0]), args[1])
        case "c10d::_allgather_base_":
            return _ring("all-gather", args[0].nbytes, args[2])
        case "c10d::_reduce_scatter_base_":
            return _ring("reduce-scatter", args[1].nbytes, args[2])
        case "c10d::alltoall_base_":
            return _all_to_all(args[1], args[4], args[2])
        case "_c10d_functional::all_reduce" | "_c10d_functional::all_reduce_":
            return _ring("all-reduce", args[0].nbytes, args[2])
        case "_c10d_functional::all_gather_into_tensor":
            return _ring("all-gather", args[0].nbytes * args[1], args[2])
        case "_c10d_functional::reduce_scatter_tensor":
            return _ring("reduce-scatter", args[0].nbytes, args[3])
        case "_c10d_functional::all_to_all_single":
            return _all_to_all(args[0], args[2], args[3])
        case "c10d::reduce_":
            return _chain("reduce", args[0], args[1], end=args[3])
        case "c10d::broadcast_":
            return _chain("broadcast", args[0], args[1], end=args[2] - 1)
        case "c10d::send":
            return Message("point-to-point", _group(args[1]).group_name, 2, sum(tensor.nbytes for tensor in args[0]))
        case name:
            return None if func._opname in _SENDS_NOTHING else Message(name, "", 2, 0)


def _chain(kind: Collective, tensors: Any, group: Any, end: int) -> Message:
    """Return the message of a reduce or broadcast, in which each rank but `end` sends all of the tensors once."""
    members = _group(group)
    size = 0 if members.rank() == end % members.size() else sum(tensor.nbytes for tensor in tensors)
    return Message(kind, members.group_name, members.size(), size)


def _ring(kind: Collective, size: int, group: Any) -> Message:
    """Return the message of a ring collective over a whole tensor of `size` bytes."""
    members = _group(group)
    ranks = members.size()
    part = -(-size // ranks) * (ranks - 1)
    return Message(kind, members.group_name, ranks, 2 * part if kind == "all-reduce" else part)


def _all_to_all(tensor: Any, rows: list[int], group: Any) -> Message:
    """Return the message of an all-to-all; `rows` are the rows for each rank, empty for equal shares."""
    members = _group(group)
    ranks, mine = members.size(), members.rank()
    row = tensor.nbytes // max(1, len(tensor))
    kept = rows[mine] * row if rows else tensor.nbytes // ranks
    return Message("all-to-all", members.group_name, ranks, tensor.nbytes - kept)


def _group(group: Any) -> dist.ProcessGroup:
    """Return the process group that an operation's argument names or wraps."""
    if isinstance(group, str):
        return process_group(group)
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)
