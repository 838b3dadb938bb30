"""What a rank sends: every collective of torch is counted, sends nothing, or stops the count by its name."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moetune.compat.torch import fake_process_group
from moetune.errors import UserError
from moetune.memory.trace import Trace
from moetune.memory.trace.log import Log, Mark, Sent
from moetune.parallel.messages import NAMESPACES, Message, message

SILENT = {"_wrap_tensor_autograd", "wait_tensor", "barrier", "monitored_barrier_", "check_for_nan", "recv_"}
COUNTED = {
    "allreduce_", "_allgather_base_", "_reduce_scatter_base_", "alltoall_base_", "all_reduce", "all_reduce_",
    "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "reduce_", "broadcast_", "send",
}  # fmt: skip


def every_collective() -> list[str]:
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    return sorted(name for name in names if name.split("::")[0] in NAMESPACES)


@pytest.mark.parametrize("name", every_collective())
def test_none_goes_by_uncounted(name: str) -> None:
    func: Any = SimpleNamespace(_schema=SimpleNamespace(name=name), _opname=name.split("::")[1])
    if func._opname in COUNTED and not (name.startswith("_c10d") and func._opname == "broadcast_"):
        return  # their numbers: below, and tests/parallel/test_layouts.py
    sent = message(func, ())
    assert (sent is None) is (func._opname in SILENT)
    if sent is not None:
        assert not sent.is_known
        marks = [Mark(0, 0, 0, "forward", "")]
        with pytest.raises(UserError, match=f"cannot count .* {name} "):
            Trace.of(Log(marks=marks, sent=[Sent(0, 0, 0, "forward", sent, None)]), lambda _: "fsdp")


@pytest.mark.parametrize(("rank", "reduce", "broadcast"), [(0, 0, 40), (1, 40, 40), (3, 40, 0)])
def test_what_a_reduce_and_a_broadcast_send(rank: int, reduce: int, broadcast: int) -> None:
    """Along a chain of four that ends at rank 0, or begins there."""
    tensors = [torch.zeros(10)]
    with fake_process_group(rank, 4):
        group = torch.distributed.group.WORLD
        for name, args, sent in (
            ("c10d::reduce_", (tensors, group, None, 0, 0), reduce),
            ("c10d::broadcast_", (tensors, group, 0, 0), broadcast),
        ):
            func: Any = SimpleNamespace(_schema=SimpleNamespace(name=name), _opname=name[6:])
            found = message(func, args)
            assert isinstance(found, Message)
            assert (found.ranks, found.bytes, found.is_known) == (4, sent, True)
