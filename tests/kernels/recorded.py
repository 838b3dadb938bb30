"""The calls that a layer of experts makes, recorded, to compare kernels with their references."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from moetune.adapt.guard.comparison import CallsSeen, copied
from moetune.adapt.guard.exercise import bank_samples
from moetune.kernels.registry import Operator
from moetune.run.dtypes import DTYPES


def calls(
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    *,
    hidden: int = 192,
    intermediate: int = 144,
    rank: int = 12,
) -> list[tuple[str, list[Any]]]:
    """Return (operator name, arguments) for each kind of call that `bank_samples` make; the same on every call.

    Calls that differ only in their number of rows are one kind.
    """
    name = next(name for name, kind in DTYPES.items() if kind == dtype)
    found: dict[Hashable, tuple[str, list[Any]]] = {}

    def compute(operator: Operator, args: Sequence[Any]) -> Any:
        kind = operator.name, *map(kind_of, args)
        if kind not in found:
            found[kind] = operator.name, copied(args)
        return operator.reference(*args)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        for sizes in bank_samples(name, hidden=hidden, intermediate=intermediate, rank=rank):
            bank = sizes.bank(device)  # an activation is recognized by calls with values over all of float32
            with CallsSeen(compute):
                sizes.exercise(device, tokens, bank)
    return list(found.values())


def kind_of(arg: Any) -> Hashable:
    """Return the properties of an argument that select a compiled kernel, to tell kinds of calls apart.

    These leave out the number of rows, a float's value unless it is 0, and the alignment of rows' positions (int64).
    """
    if isinstance(arg, Tensor):
        is_aligned = arg.dtype == torch.int64 or arg.storage_offset() * arg.itemsize % 16 == 0
        return arg.dtype, arg.shape[1:], arg.stride(), is_aligned
    if isinstance(arg, (list, tuple)):
        return None
    return bool(arg) if isinstance(arg, float) else arg
