"""What is changed of torch, and used of it without being public, is still necessary and possible."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from moetune.compat.torch import (
    NO_PASS,
    HostModule,
    after_backward,
    all_to_all,
    backward_pass,
    called_by_autograd,
    consolidate,
    fake_process_group,
    is_observed,
    noting_resizes,
    process_group,
    shard_place,
)


@pytest.mark.parametrize("stays", [False, True])
def test_a_module_on_the_host_stays_there(stays):
    class Held(HostModule):
        def names_on_host(self):
            return ("data",) if stays else ()

    model = torch.nn.Sequential(Held())
    model[0].register_buffer("data", torch.zeros(1))
    expected = torch.float32 if stays else torch.float64
    assert model.double()[0].data.dtype == model.to(torch.float64)[0].data.dtype == expected


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        seen.append(backward_pass())
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen.append(backward_pass())
        after_backward(lambda: ctx.seen.append("ended"))
        return gradient, None


def test_a_backward_pass_has_a_number_and_an_end() -> None:
    seen: list[object] = []
    x = torch.ones(1, requires_grad=True)
    (InBackward.apply(x, seen) * 2).backward()
    before, inside, ended = seen
    assert before == NO_PASS != inside
    assert ended == "ended"
    assert backward_pass() == NO_PASS


def test_resizes_are_noted_and_no_operations() -> None:
    stock, noted = torch.UntypedStorage.resize_, []
    storage = torch.empty(4).untyped_storage()
    with noting_resizes(lambda one: noted.append((one is storage, one.nbytes()))):
        storage.resize_(0)
        storage.resize_(16)
    assert noted == [(True, 0), (True, 16)]
    assert torch.UntypedStorage.resize_ is stock


def test_a_fake_process_group_answers_and_leaves_nothing() -> None:
    hook = sys.excepthook
    with fake_process_group(1, 4):
        assert (dist.get_rank(), dist.get_world_size()) == (1, 4)
        dist.all_reduce(torch.ones(1))
        assert process_group(dist.group.WORLD.group_name) is dist.group.WORLD
    assert not dist.is_initialized()
    assert sys.excepthook is hook


def test_the_place_of_a_shard() -> None:
    with fake_process_group(1, 2):
        part = DTensor.from_local(torch.empty(3, 4), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
        assert shard_place(part) == ((3, 0), (3, 4))


def test_what_ranks_wrote_becomes_one_file(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping={"a": 1, "b": 2}, save_distributed=True)
    tensors = {"a": torch.arange(6.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    torch.testing.assert_close(load_file(consolidate(tmp_path, ["a", "b"])), tensors, rtol=0, atol=0)


class _Callers(TorchDispatchMode):
    """Notes of each addition whether autograd's engine called it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.add.Tensor:
            self.seen.append(called_by_autograd())
        return func(*args, **(kwargs or {}))


def test_an_addition_is_called_by_autograd_or_by_python() -> None:
    x = torch.ones(2, requires_grad=True)
    loss = (x * 2 + x * 3).sum()
    with _Callers() as mode:
        loss.backward()  # adds both gradients of x
        _ = x.detach() + 1
    assert mode.seen == [True, False]


def test_operators_are_observed_by_modes_profilers_and_subclasses() -> None:
    tensor = torch.zeros(2)
    assert not is_observed(tensor)
    assert not is_observed(torch.nn.Parameter(tensor))
    with FakeTensorMode() as mode:
        assert is_observed(tensor)
        fake = torch.zeros(2)
    assert fake.fake_mode is mode
    assert is_observed(fake)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert is_observed(tensor)


def test_an_all_to_all_has_a_gradient_and_memory_of_its_own() -> None:
    rows = torch.ones(4, 3, requires_grad=True)
    with fake_process_group(0, 2):
        received = all_to_all(rows, [1, 4], [2, 2], torch.distributed.group.WORLD)
        assert received.shape == (5, 3)
        assert type(received) is torch.Tensor
        received.sum().backward()
    assert rows.grad is not None
    assert rows.grad.shape == rows.shape
