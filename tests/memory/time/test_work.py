"""What single operations do, against formulas; what a step does, against the arithmetic of its model."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, randn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from moetune.kernels import operators as kernels
from moetune.memory.time.work import Work, works
from moetune.memory.trace import trace
from moetune.models.catalog.gpus import find_gpu
from moetune.run.resolve import resolve
from tests.memory.models import toy_run, write_toy

F, B = torch.float32, torch.bfloat16


class Counting(TorchDispatchMode):
    """Adds up the work of what runs inside."""

    work = Work()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for work, _ in works(func, args, kwargs or {}, out, (9, 0)):
            self.work += work
        return out


def counted(operation: Callable[..., object], *tensors: Tensor) -> Work:
    with Counting() as mode:
        operation(*tensors)
    return mode.work


@pytest.mark.parametrize(
    ("operation", "shapes"),
    [
        (torch.mm, [(6, 5), (5, 7)]),
        (torch.bmm, [(3, 6, 5), (3, 5, 7)]),
        (torch.addmm, [(7,), (6, 5), (5, 7)]),
        (torch.nn.functional.linear, [(2, 6, 5), (7, 5), (7,)]),
    ],
)
def test_flops_are_those_of_torch(operation: Callable[..., object], shapes: list[tuple[int, ...]]) -> None:
    tensors = [randn(shape) for shape in shapes]
    with FlopCounterMode(display=False) as known:
        operation(*tensors)
    work = counted(operation, *tensors)
    assert work.flops == 0
    assert work.flops32 == known.get_total_flops() > 0
    assert counted(operation, *(tensor.to(B) for tensor in tensors)).flops == known.get_total_flops()


def test_of_causal_attention_half() -> None:
    run = torch.ops.aten._scaled_dot_product_flash_attention
    with torch.device("meta"):
        q = randn(2, 4, 16, 8, dtype=B)
        whole, half = (counted(lambda q: run(q, q, q, 0.0, is_causal), q) for is_causal in (False, True))  # noqa: B023
    assert whole.flops == 2 * half.flops == 2 * 2 * (2 * 4 * 16 * 16 * 8)


def test_groups_of_experts() -> None:
    counts = [3, 0, 5]
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)
    run = torch.ops.moetune.grouped_mm
    forward = counted(lambda a, b: run(a, b, ends, counts), randn(8, 16), randn(3, 16, 24))
    outer = counted(lambda a, b: run(a.T, b, ends, counts), randn(8, 16), randn(8, 24))
    assert forward.flops32 == outer.flops32 == 2 * 8 * 16 * 24
    assert forward.launches == outer.launches == 2  # experts that have rows: there is no one kernel for float32


@pytest.mark.parametrize(
    ("operation", "size", "launches"),
    [
        (lambda a: a + a[0], 4 * (100 + 10 + 100), 1),
        (lambda a: a.mul_(2), 4 * 200, 1),
        (lambda a: a.view(5, 20).t()[1:], 0, 0),
        (lambda a: torch.empty_like(a), 0, 0),
        (lambda a: a.clone(), 4 * 200, 1),
        (lambda a: a.t().contiguous(), 4 * 200, 1),
        (lambda a: a.expand(3, 10, 10) * 1, 4 * (100 + 300), 1),  # what is expanded is read once
        (lambda a: a[torch.tensor([1, 2])], 4 * 2 * 20 + 8 * 2, 1),
        (lambda a: a.zero_(), 4 * 100, 1),
        (lambda a: a**2, 4 * 200, 1),
        (lambda a: 2.0**a, 4 * 200, 1),
        (lambda a: a[:5].copy_(a[5:]), 4 * 100, 1),
        (lambda a: torch._foreach_add_([a, a[0]], 1), 4 * 2 * 110, 2 / 30),
    ],
)
def test_bytes_and_launches(operation: Callable[..., object], size: int, launches: int) -> None:
    work = counted(operation, randn(10, 10))
    assert (work.bytes, work.launches, work.own_launches) == (size, pytest.approx(launches), 0)


def test_low_rank_products_are_counted_whole() -> None:
    x, A, B, out = randn(5, 8), randn(1, 1, 3, 8), randn(1, 1, 6, 3), randn(5, 6)
    work = counted(lambda: kernels.low_rank(x, A, B, out, out, None, [5], 1.0))
    assert (work.flops32, work.launches, work.own_launches) == (2 * 5 * 3 * (8 + 6), 1, 1)
    assert work.bytes == 4 * (5 * 8 + 3 * 8 + 6 * 3 + 2 * 5 * 6)
    W, few, second, ends = randn(2, 8, 6), randn(5, 1, 3), randn(2, 1, 6, 3), torch.tensor([2, 5], dtype=torch.int32)
    product = counted(lambda: kernels.low_rank_product_(out, x, W, few, second, ends, [2, 3], 1.0, False))
    assert (product.flops32, product.launches) == (2 * 5 * 6 * (8 + 3), 1)
    assert product.bytes == 4 * (5 * 6 + 5 * 8 + 2 * 8 * 6 + 5 * 3 + 2 * 6 * 3 + 2)
    narrow = randn(5, 1, 3)
    work = counted(lambda: kernels.low_rank_gradients_(narrow, x, narrow, out, A, B, None, None, None, [5], 1.0))
    assert (work.flops32, work.launches) == (2 * 5 * 3 * (8 + 6), 1)


def test_a_step_does_the_arithmetic_of_its_model(tmp_path: Path) -> None:
    """Routers alone train, so of a frozen expert there are three products forward, and in backward gate and up again,
    and what becomes of the gradients on the way through all three: 8 · 2 · H · I of each row."""
    model = write_toy(tmp_path, "mixtral", num_hidden_layers=3)
    config = toy_run(model, "mixtral", {"router": "all"}, model={"dtype": "bf16"}, train={"accumulate": 3})
    run = resolve(config, "cuda")
    shape = run.structure.moe_layers[0].shape
    traced = trace(run, gpu=find_gpu("h100"))
    rows = 2 * 32 * 2 * 3  # micro-batch × length × top-2 × accumulate
    assert traced.work["experts"].flops == 3 * rows * 8 * 2 * shape.hidden * shape.intermediate
    weights = 3 * 3 * 2 * 4 * 3 * shape.hidden * shape.intermediate * 2  # twice, of 4 experts, 3 matrices of 2 bytes
    assert traced.work["dequantization"].bytes > weights
    assert traced.work["experts"].synchronizations == 0  # each layer is one group, whose kernels read where rows end
    assert traced.work["optimizer"].synchronizations == 2
    assert traced.work["transfers"].copied > 0


def test_without_a_card_nothing_is_counted(tmp_path: Path) -> None:
    model = write_toy(tmp_path, "mixtral", num_hidden_layers=1)
    assert not trace(toy_run(model, "mixtral", {"router": "all"})).work
