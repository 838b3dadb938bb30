"""What is changed of torch, and used of it without being public, is still necessary and possible."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from moetune.compat.torch import (
    _IN_PLACE,
    _ON_META,
    NO_PASS,
    HostModule,
    QuickFakeMode,
    add_missing_fakes,
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
from moetune.kernels import operators


@pytest.mark.parametrize("stays", [False, True])
def test_a_module_on_the_host_stays_there(stays):
    class Held(HostModule):
        on_host = stays

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


@pytest.mark.full
def test_torch_has_no_fused_sgd_for_fake_tensors() -> None:
    asked = "import torch; print(torch._C._dispatch_has_kernel_for_dispatch_key('aten::_fused_sgd_', 'Meta'))"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "False"
    add_missing_fakes()
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(2**50))  # real zeros of that size cannot be had
        weight.grad = torch.empty_like(weight)
        torch.optim.SGD([weight], lr=0.1, fused=True).step()


def arguments_of(name: str) -> list[tuple[tuple, dict]]:
    """Two calls of an operation that a step makes: on dense tensors, and on views and other types."""
    x, wide, flat = (
        torch.empty(6, 8),
        torch.empty(12, 8, dtype=torch.bfloat16)[::2],
        torch.empty(3, 6, 8).transpose(0, 1),
    )
    rows, vector = torch.zeros(6, dtype=torch.int64), torch.empty(8)
    two = [((x, vector), {}), ((wide, x[:1]), {})]
    return {
        "_to_copy": [((x,), {"dtype": torch.bfloat16}), ((flat,), {})],
        "_unsafe_view": [((x, [48]), {}), ((x, [2, 3, -1]), {})],
        "add": two,
        "add_": [((x, vector), {}), ((x, wide), {"alpha": 2})],
        "addmm_": [((x, torch.empty(6, 5), torch.empty(5, 8)), {}), ((x, x @ x.T, x), {"alpha": 2})],
        "alias": [((x,), {}), ((wide,), {})],
        "as_strided": [((x, [3, 2], [2, 1], 4), {}), ((flat, [3], [0]), {})],
        "bitwise_and_": [((rows, -2), {}), ((rows[::2], 1), {})],
        "bmm": [((flat, torch.empty(6, 8, 2)), {}), ((torch.empty(2, 3, 4), torch.empty(2, 5, 4).mT), {})],
        "cat": [(([x, x], -1), {}), (([x, wide],), {})],
        "copy_": [((x, wide), {}), ((wide, vector), {})],
        "detach": [((x,), {}), ((wide,), {})],
        "div": [((x, 2.0), {}), ((wide, 3), {})] if name.endswith("Scalar") else two,
        "expand": [((vector, [6, -1]), {}), ((x[:, None], [-1, 4, -1]), {})],
        "exp_": [((x,), {}), ((wide,), {})],
        "gather": [((x, 0, rows[:, None]), {}), ((wide, 1, rows[None]), {})],
        "index_add_": [((x, 0, rows, flat[:, 0]), {}), ((x, 1, rows, torch.empty(6, 6)), {"alpha": 2})],
        "index_copy_": [((x, 0, rows, flat[:, 0]), {}), ((flat, 0, rows, flat), {})],
        "index_put_": [((x, [rows], flat[:, 0]), {}), ((flat, [rows, rows[:1]], vector), {})],
        "linalg_vector_norm": [((x,), {}), ((wide, 2, [1], True), {"dtype": torch.float32})],
        "mean": [((x, [-1], True), {}), ((flat, [0]), {})],
        "mm": [((x, torch.empty(8, 3)), {}), ((wide.T, torch.empty(6, 2, dtype=torch.bfloat16)), {})],
        "mul": [((x, 2.0), {}), ((wide, 3), {})] if name.endswith("Scalar") else two,
        "mul_": [((x, vector), {}), ((wide, torch.tensor(2.0)), {})],
        "neg": [((x,), {}), ((flat,), {})],
        "permute": [((flat, [2, 0, 1]), {}), ((x, [-1, 0]), {})],
        "pow": [((x, 2), {}), ((wide, 0.5), {})],
        "pow_": [((x, 2), {}), ((wide, 0.5), {})],
        "rsqrt": [((x,), {}), ((flat,), {})],
        "scatter_add_": [((x, 0, rows[:, None], x), {}), ((wide, 1, rows[None], wide), {})],
        "select": [((x, 0, -1), {}), ((flat, 1, 2), {})],
        "silu": [((x,), {}), ((wide,), {})],
        "silu_backward": [((x, x), {}), ((wide, wide), {})],
        "slice": [((x, 0, 2, 4), {}), ((flat, 1, 0, 9223372036854775807, 2), {})],
        "split": [((x, 4), {}), ((flat, 3, 2), {})],
        "split_with_sizes": [((x, [2, 4]), {}), ((flat, [1, 2], 1), {})],
        "squeeze": [((x[:1], 0), {}), ((x, 0), {})],
        "sub_": [((x, vector), {}), ((x, wide), {"alpha": 2})],
        "sum": [((x, [0]), {}), ((wide, [0, 1], True), {"dtype": torch.float32})],
        "t": [((x,), {}), ((vector,), {})],
        "transpose": [((x, 0, 1), {}), ((flat, -1, -3), {})],
        "unbind": [((x,), {}), ((flat, 1), {})],
        "unsqueeze": [((x, -1), {}), ((flat, 1), {})],
        "view": [((x, torch.int16), {}), ((flat, torch.int32), {})]
        if name.endswith("dtype")
        else [((x, [4, 12]), {}), ((x, [-1]), {})],
        "zero_": [((x,), {}), ((wide,), {})],
    }[name.partition(".")[0]]


@pytest.mark.parametrize("operation", sorted(_ON_META, key=str), ids=str)
def test_quick_fakes_are_torchs_own(operation: torch._ops.OpOverload) -> None:
    """In shape, strides, type, device, and in which storage they share; when they are made again too."""

    def described(mode: FakeTensorMode) -> list:
        found = []
        with mode:
            for args, kwargs in arguments_of(operation.__name__) * 2:
                out = operation(*args, **kwargs)
                given = [*args[0]] if isinstance(args[0], list) else [args[0]]
                for tensor in (out,) if isinstance(out, Tensor) else out:
                    assert isinstance(tensor, FakeTensor)
                    shared = [tensor.untyped_storage()._cdata == one.untyped_storage()._cdata for one in given]
                    layout = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device
                    found.append((layout, shared, tensor is args[0], tensor.untyped_storage().nbytes()))
        return found

    assert described(QuickFakeMode()) == described(FakeTensorMode())
    assert (operation in _IN_PLACE) == operation._schema.is_mutable


def test_operators_of_ours_change_values_only() -> None:
    """Quick fakes leave out those that return nothing, and make again what those return that also write."""

    def described(mode: FakeTensorMode) -> list:
        with mode:
            x, order, inverse = torch.empty(6, 4), torch.empty(8, dtype=torch.int64), torch.empty(12, dtype=torch.int32)
            rows = [operators.gather_rows(x, order, 2, inverse) for _ in range(2)]
            assert operators.add_rows_(x, rows[0], order, 2, None) is None
        assert len({one.untyped_storage()._cdata for one in (x, *rows)}) == 3
        return [(one.shape, one.stride(), one.dtype, one.device) for one in (x, order, inverse, *rows)]

    assert described(QuickFakeMode()) == described(FakeTensorMode())


def test_what_is_made_again_is_of_its_own_type_and_memory() -> None:
    with QuickFakeMode():
        x, flags = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.bool)
        assert [(x * number).dtype for number in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]
        assert (flags * True).dtype == torch.bool != (flags * 1).dtype
        made = [torch.sort(x) for _ in range(2)]
        normed = [torch.native_layer_norm(torch.empty(3, 4), [4], None, None, 1e-5) for _ in range(2)]
        assert [[tensor.shape for tensor in one] for one in normed] == [[(3, 4), (3, 1), (3, 1)]] * 2
        assert len({values.untyped_storage()._cdata for pair in made for values in pair}) == 4


def test_quick_fakes_leave_other_tensors_to_torch() -> None:
    with QuickFakeMode():
        known = torch.tensor(2.0)  # its value is: torch answers questions about it
        assert (known * 3).item() == 6
        assert known.is_cpu
        other = torch.empty(3).to("meta")
        assert (other * 2).device.type == "meta"


def test_real_tensors_become_fake_ones_of_their_own_layout() -> None:
    real, places = torch.empty(4, 6).T[::2], torch.tensor([2, 0, 1])

    def described(mode: FakeTensorMode) -> list:
        with mode:
            ids = torch.empty(5, dtype=torch.int64)
            made = [torch.tensor([[1, 2]]), torch.tensor([1.5, 2.5], dtype=torch.float64), torch.tensor([])]
            made += [out for _ in range(2) for out in (real * 2, places[ids])]
            assert all(isinstance(one, FakeTensor) and one.untyped_storage().nbytes() >= one.nbytes for one in made)
            with pytest.raises(DynamicOutputShapeException):  # the number of rows depends on values
                _ = real[torch.tensor([True, False, True])]
        return [(one.shape, one.stride(), one.dtype, one.device, one.untyped_storage().nbytes()) for one in made]

    assert described(QuickFakeMode()) == described(FakeTensorMode(allow_non_fake_inputs=True))


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
    with QuickFakeMode() as mode:
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
