"""What is changed of torch, and used of it without being public, is still necessary and possible."""

import subprocess
import sys

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from moetune.patches.torch import (
    NO_PASS,
    add_missing_fakes,
    after_backward,
    backward_pass,
    fake_process_group,
    noting_resizes,
    process_group,
)


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


def test_torch_has_no_fused_sgd_for_fake_tensors() -> None:
    asked = "import torch; print(torch._C._dispatch_has_kernel_for_dispatch_key('aten::_fused_sgd_', 'Meta'))"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "False"
    add_missing_fakes()
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(2**50))  # real zeros of that size cannot be had
        weight.grad = torch.empty_like(weight)
        torch.optim.SGD([weight], lr=0.1, fused=True).step()


def test_a_fake_process_group_answers_and_leaves_nothing() -> None:
    hook = sys.excepthook
    with fake_process_group(1, 4):
        assert (dist.get_rank(), dist.get_world_size()) == (1, 4)
        dist.all_reduce(torch.ones(1))
        assert process_group(dist.group.WORLD.group_name) is dist.group.WORLD
    assert not dist.is_initialized()
    assert sys.excepthook is hook
