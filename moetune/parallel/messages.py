"""What a rank sends to others, read off torch.distributed's operations as they are dispatched."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from moetune.compat.torch import process_group

Kind = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "reduce", "broadcast"]
NAMESPACES = ("c10d", "_c10d_functional")
_SENDS_NOTHING = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_", "check_for_nan"}


@dataclass(frozen=True)
class Message:
    """One call of a collective.

    Attributes:
        group: torch's name of its process group.
        ranks: how many are in it.
        bytes: that leave this rank, in a ring: (n - 1)/n of the whole tensor, and of an all-reduce twice that; of an
            all-to-all what is for other ranks; of a reduce and a broadcast all of it, but of the rank where they end
            nothing.
    """

    kind: Kind | str
    group: str
    ranks: int
    bytes: int


def uncounted(sent: Message) -> bool:
    """Whether `message` did not know the operation, whose name is then the kind."""
    return sent.kind not in typing.get_args(Kind)


def message(func: Any, args: Any) -> Message | None:
    """What an operation of `NAMESPACES` sends; None if that is nothing."""
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
            return _chain("reduce", sum(tensor.nbytes for tensor in args[0]), args[1], ends_at=args[3])
        case "c10d::broadcast_":
            members = _group(args[1])
            return _chain("broadcast", sum(t.nbytes for t in args[0]), members, ends_at=(args[2] - 1) % members.size())
        case name:
            return None if func._opname in _SENDS_NOTHING else Message(name, "", 2, 0)


def _chain(kind: Kind, size: int, group: Any, ends_at: int) -> Message:
    members = _group(group)
    return Message(kind, members.group_name, members.size(), 0 if members.rank() == ends_at else size)


def _ring(kind: Kind, size: int, group: Any) -> Message:
    members = _group(group)
    ranks = members.size()
    part = -(-size // ranks) * (ranks - 1)
    return Message(kind, members.group_name, ranks, 2 * part if kind == "all-reduce" else part)


def _all_to_all(tensor: Any, rows: list[int], group: Any) -> Message:
    members = _group(group)
    ranks, mine = members.size(), members.rank()
    row = tensor.nbytes // max(1, len(tensor))
    kept = rows[mine] * row if rows else tensor.nbytes // ranks
    return Message("all-to-all", members.group_name, ranks, tensor.nbytes - kept)


def _group(group: Any) -> dist.ProcessGroup:
    if isinstance(group, str):
        return process_group(group)
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)
