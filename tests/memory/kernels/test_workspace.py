"""What kernels take inside, to the byte: what torch 2.11's CUDA build asked of its allocator in these calls."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moetune.adapt.flash import within_documents
from moetune.kernels.routing import sorted_positions
from moetune.memory.trace.tracker import Tracker
from moetune.models.catalog.gpus import find_gpu

aten = torch.ops.aten
BF16 = torch.bfloat16


def inside(gpu: str, run: Any) -> list[int]:
    """Bytes that the operations of `run` take inside, in order; all of them are gone at its end."""
    with FakeTensorMode(), (tracker := Tracker({}, capability=find_gpu(gpu).capability)):
        run()
    blocks = [block for block in tracker.log.blocks if block.op.startswith("inside ")]
    assert all(block.died is not None for block in blocks)
    return [block.bytes for block in blocks]


def tensors(rows: int, heads: int, kv_heads: int, length: int, d: int, d_v: int, dtype: torch.dtype) -> Any:
    """Query, key and value whose heads lie inside their tokens, as models make them."""
    shapes = ((heads, d), (kv_heads, d), (kv_heads, d_v))
    return [torch.empty(rows, length, h, size, dtype=dtype).transpose(1, 2).requires_grad_() for h, size in shapes]


# (GPU, B, h, S, d, d_v, dtype): forward's accumulator, then backward's row sums, workspace
EFFICIENT = [
    ("h100", 1, 16, 4096, 64, 64, BF16, [262144 + 16793600]),
    ("h100", 1, 16, 4096, 96, 96, BF16, [262144 + 33562624]),
    ("a6000", 1, 16, 4096, 96, 96, BF16, [262144 + 33570816]),  # a kernel of its own for 8.6 and 8.9
    ("a100-40gb", 1, 16, 4096, 128, 128, BF16, [262144 + 33562624]),
    ("l40s", 1, 16, 4096, 128, 128, BF16, [262144 + 46170112]),  # too little shared memory for the one above
    ("l40s", 1, 16, 4096, 192, 128, BF16, [33554432, 262144 + 69230592]),
    ("h100", 2, 32, 2048, 256, 256, BF16, [134217728, 524288 + 159449088]),
    ("h100", 1, 8, 304, 192, 192, BF16, [1867776, 9728 + 7603328]),
    ("a6000", 1, 8, 304, 128, 128, BF16, [9728 + 3933440]),
    ("h100", 2, 8, 512, 128, 128, torch.float32, [32768 + 32768 + 4194304]),  # the product comes before the workspace
    ("a6000", 2, 8, 512, 192, 128, torch.float32, [32768 + 6297600]),
]


@pytest.mark.parametrize(("gpu", "rows", "heads", "length", "d", "d_v", "dtype", "expected"), EFFICIENT)
def test_the_efficient_kernel(
    gpu: str, rows: int, heads: int, length: int, d: int, d_v: int, dtype: torch.dtype, expected: list[int]
) -> None:
    def run() -> None:
        q, k, v = tensors(rows, heads, heads, length, d, d_v, dtype)
        mask = torch.empty(rows, 1, length, length, dtype=dtype).expand(rows, heads, length, length)
        out = aten._scaled_dot_product_efficient_attention(q, k, v, mask, True)[0]
        out.backward(torch.empty_like(out))

    assert sum(inside(gpu, run)) == sum(expected)


# (h, h_kv, S, d): row sums, dQ, and with grouped heads dK and dV of all heads
FLASH = [
    (8, 8, 1000, 80, [65536, 6291456]),
    (32, 8, 2048, 128, [524288, 67108864, 33554432, 33554432]),
    (8, 8, 1000, 192, [65536, 12582912]),
]


@pytest.mark.parametrize(("heads", "kv_heads", "length", "d", "expected"), FLASH)
def test_the_flash_kernel(heads: int, kv_heads: int, length: int, d: int, expected: list[int]) -> None:
    def run() -> None:
        q, k, v = tensors(2, heads, kv_heads, length, d, d, BF16)
        out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        out.backward(torch.empty_like(out))

    assert inside("l40s", run) == expected


def test_the_flash_kernel_of_documents_leaves_room_between_them() -> None:
    def run() -> None:
        q, k, v = (torch.empty(300, 4, 64, dtype=BF16, requires_grad=True) for _ in range(3))
        starts = torch.tensor([0, 100, 300], dtype=torch.int32)
        out = within_documents(q, k, v, None, starts, longest=200, scaling=0.125, window=0)
        out.backward(torch.empty_like(out))

    rows = 300 + 2 * 128
    assert inside("l40s", run) == [4 * rows * 4, rows * 4 * 64 * 4]


def test_the_softmax_of_scores_multiplies_before_it_subtracts() -> None:
    def run() -> None:
        scores = torch.empty(2, 4, 8, 9, dtype=BF16, requires_grad=True)
        out = scores.softmax(-1)
        out.backward(torch.empty_like(out))

    assert inside("l40s", run) == [2 * 4 * 8 * 9 * 2]


def test_on_a_cpu_nothing_is_added() -> None:
    with FakeTensorMode(), (tracker := Tracker({})):
        scores = torch.empty(8, 9, requires_grad=True)
        scores.softmax(-1).sum().backward()
    assert not [block for block in tracker.log.blocks if block.op.startswith("inside ")]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(4096, [32768]), (8192, [65536, 151039]), (32768, [262144, 550399]), (1048576, [8388608, 17074687])],
)
def test_sorting_what_goes_to_which_expert(count: int, expected: list[int]) -> None:
    """What is asked for in one piece is told in two, to 2.5 %."""
    numbers, *rest = inside("l40s", lambda: torch.argsort(torch.empty(count, dtype=torch.int64), stable=True))
    assert numbers == expected[0]
    assert sum(rest) == pytest.approx(sum(expected[1:]), rel=0.025)


@pytest.mark.parametrize(("experts", "expected"), [(8, 256), (100, 4096), (128, 4096), (200, 8192), (512, 16384)])
def test_the_kernel_that_sorts_counts_the_rows_of_each_expert(experts: int, expected: int) -> None:
    """4 bytes for each 512 rows and each expert, and up to the next power of two."""
    assert inside("l40s", lambda: sorted_positions(torch.empty(4096, dtype=torch.int64), experts)) == [expected]


@pytest.mark.parametrize("double_quant", [False, True])
def test_a_product_with_a_4_bit_layer_unpacks_it_first(double_quant: bool) -> None:
    rows, (out, into) = 1024, (512, 256)
    blocks = out * into // 64

    def run() -> None:
        x, packed = torch.empty(rows, into, dtype=BF16), torch.empty(out * into // 2, 1, dtype=torch.uint8)
        scales, nested = torch.empty(blocks), {}
        if double_quant:
            scales, eight = torch.empty(blocks // 256), torch.empty(blocks, dtype=torch.uint8)
            nested = {"absmax_8bit": eight, "absmax_code": torch.empty(256), "absmax_offset": torch.empty(())}
        torch.ops.bitsandbytes.gemm_4bit(x, packed, (out, into), scales, 64, "nf4", **nested)

    assert inside("l40s", run) == [4 * blocks] * (2 if double_quant else 0) + [2 * out * into]


@pytest.mark.parametrize(("experts", "expected"), [(2, 68096), (16, 68608), (33, 69632), (128, 75264)])
def test_a_grouped_product_on_hopper(experts: int, expected: int) -> None:
    """Rounded up to 512 bytes each, as torch 2.11's allocator counted them."""

    def run() -> None:
        ends = torch.empty(experts, dtype=torch.int32)
        torch.ops.moetune.grouped_mm(
            torch.empty(1024, 64, dtype=BF16), torch.empty(experts, 64, 32, dtype=BF16), ends, [1] * experts
        )

    assert sum(-(-size // 512) * 512 for size in inside("h100", run)) == expected
    assert inside("a6000", run) == []
