"""Every storage holds exactly what bitsandbytes (or a cast) makes of each matrix, in exactly the promised bytes."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moetune.experts.kernels import operators as kernels
from moetune.experts.quantized import QuantizedExperts, QuantizedLinear, Storage
from moetune.run.dtypes import DTYPES

STORAGES: list[tuple[Storage, bool]] = [
    ("nf4", False),
    ("nf4", True),
    ("int8", False),
    ("mxfp4", False),
    ("bf16", False),
    ("fp32", False),
]
# One block; no whole number of blocks; an odd number of weights; more blocks than share a second-level scale.
SHAPES = [(8, 8), (6, 20), (5, 13), (40, 512)]

every_storage = pytest.mark.parametrize(("storage", "double_quant"), STORAGES)
every_shape = pytest.mark.parametrize("shape", SHAPES)


def matrices(shape: tuple[int, int], count: int = 3) -> Tensor:
    torch.manual_seed(0)
    scales = torch.tensor([1e-3, 1.0, 50.0])[:count, None, None]
    return torch.randn(count, *shape) * scales


def packed(storage: Storage, double_quant: bool, weights: Tensor) -> QuantizedExperts:
    stack = QuantizedExperts(len(weights), tuple(weights.shape[1:]), storage, double_quant=double_quant)
    for index in torch.randperm(len(weights)).tolist():  # in whatever order a loader delivers them
        stack.quantize_(index, weights[index])
    return stack


def matrix_bytes(storage: Storage, double_quant: bool, shape: tuple[int, int]) -> int:
    weights = shape[0] * shape[1]
    blocks = -(-weights // 64)
    match storage:
        case "nf4":
            scales = blocks + 4 * -(-blocks // 256) + 4 if double_quant else 4 * blocks
            return -(-weights // 2) + scales
        case "int8":
            return weights + 4 * shape[0]
        case "mxfp4":
            return 17 * -(-weights // 32)
        case _:
            return weights * DTYPES[storage].itemsize


@every_shape
@pytest.mark.parametrize("double_quant", [False, True])
def test_an_nf4_slice_is_what_bitsandbytes_makes_of_that_matrix(shape: tuple[int, int], double_quant: bool) -> None:
    weights = matrices(shape)
    stack = packed("nf4", double_quant, weights)
    for index, weight in enumerate(weights):
        data, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=double_quant)
        assert torch.equal(stack.data[index], data.view(-1))
        assert torch.equal(stack.absmax[index], state.absmax)
        if double_quant:
            assert torch.equal(stack.nested_absmax[index], state.state2.absmax)
            assert torch.equal(stack.offset[index], state.offset)
            assert torch.equal(stack.nested_code, state.state2.code)
        state.shape = torch.Size([weight.numel()])  # flat, the CPU's kernel is exact (docs/reference/upstream.md)
        assert torch.equal(stack.matrix(index, torch.float32), bnb.dequantize_4bit(data, state).view(shape))


@every_shape
@pytest.mark.parametrize("at_once", [kernels.INT8_AT_ONCE, 24])
def test_an_int8_slice_is_what_bitsandbytes_makes_of_that_matrix(
    shape: tuple[int, int], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "INT8_AT_ONCE", at_once)
    weights = matrices(shape)
    stack = packed("int8", False, weights)
    for index, weight in enumerate(weights):
        data, scale, _ = bnb.int8_vectorwise_quant(weight.half())
        assert torch.equal(stack.data[index], data)
        assert torch.equal(stack.absmax[index], scale)
        assert torch.equal(stack.matrix(index, torch.float32), bnb.int8_vectorwise_dequant(data, scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("at_once", [kernels.MXFP4_AT_ONCE, 96])
def test_mxfp4_is_unpacked_as_transformers_does(
    dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every byte and every scale, to the bit: zeros keep their sign, and what is infinite or none stays so."""
    monkeypatch.setattr(kernels, "MXFP4_AT_ONCE", at_once)
    blocks = torch.arange(256, dtype=torch.uint8).repeat(256).view(2, 32, 64, 16)
    scales = torch.arange(256, dtype=torch.uint8).repeat(16).view(2, 32, 64)
    blocks = blocks[..., torch.randperm(16)]
    stack = QuantizedExperts(2, (32, 2048), "mxfp4")
    for index in range(2):
        stack.put_quantized_(index, {"data": blocks[index].flatten(), "scales": scales[index].flatten()})
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).mT.contiguous()
    assert torch.equal(stack.matrices(slice(0, 2), dtype).view(bits), expected.view(bits))


def test_mxfp4_rounds_to_the_nearest_and_loses_nothing_of_its_own() -> None:
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    weights = torch.linspace(-6, 6, 3200).view(100, 32)
    weights[:, 0] = 6.0  # of every block the largest
    stack = packed("mxfp4", False, weights[None])
    nearest = (weights.abs()[..., None] - levels).abs().amin(-1)
    assert torch.equal((stack.matrix(0, torch.float32) - weights).abs(), nearest)
    assert torch.equal(packed("mxfp4", False, weights[None] * 2**-20).data, stack.data)

    ties = torch.tensor([[6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, *[0.0] * 24]])
    assert packed("mxfp4", False, ties[None]).matrix(0, torch.float32)[0, :8].tolist() == [6, 0, 1, 1, 2, 2, 4, 4]

    blocks = torch.randint(0, 256, (1, 40, 4, 16), dtype=torch.uint8)
    scales = torch.randint(3, 250, (1, 40, 4), dtype=torch.uint8)
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).mT
    assert torch.equal(packed("mxfp4", False, values).matrix(0, torch.float32), values[0])


@every_shape
@pytest.mark.parametrize("storage", ["bf16", "fp32"])
def test_a_plain_slice_is_a_cast(shape: tuple[int, int], storage: Storage) -> None:
    weights = matrices(shape)
    stack = packed(storage, False, weights)
    for index, weight in enumerate(weights):
        assert torch.equal(stack.matrix(index, torch.float32), weight.to(DTYPES[storage]).float())


@every_shape
@every_storage
def test_the_buffers_take_the_promised_bytes(shape: tuple[int, int], storage: Storage, double_quant: bool) -> None:
    for device in ("cpu", "meta"):
        stack = QuantizedExperts(3, shape, storage, double_quant=double_quant, device=device)
        shared = {"nf4": 256 * 4 * double_quant, "mxfp4": 2 * 256 * 4}.get(storage, 0)  # tables, once a stack
        assert sum(b.nbytes for b in stack.buffers()) == 3 * matrix_bytes(storage, double_quant, shape) + shared


@every_storage
def test_double_quantization_takes_0_5159_bytes_a_weight_and_single_0_5625(
    storage: Storage, double_quant: bool
) -> None:
    expected = {"nf4": 0.5159 if double_quant else 0.5625, "int8": 1.0, "mxfp4": 17 / 32, "bf16": 2.0, "fp32": 4.0}[
        storage
    ]
    stack = QuantizedExperts(8, (14336, 4096), storage, double_quant=double_quant, device="meta")
    per_weight = sum(buffer.nbytes for buffer in stack.buffers()) / (8 * 14336 * 4096)
    assert per_weight == pytest.approx(expected, abs=1e-3 if storage == "int8" else 5e-5)


@every_storage
def test_nothing_is_a_parameter_and_everything_persists(storage: Storage, double_quant: bool) -> None:
    weights = matrices((6, 20))
    stack = packed(storage, double_quant, weights)
    assert list(stack.parameters()) == []
    assert stack.state_dict().keys() == dict(stack.named_buffers()).keys()

    restored = QuantizedExperts(3, (6, 20), storage, double_quant=double_quant)
    restored.load_state_dict(stack.state_dict())
    for index in range(3):
        assert torch.equal(restored.matrix(index, torch.float32), stack.matrix(index, torch.float32))


@every_storage
def test_packing_one_matrix_leaves_the_others_alone(storage: Storage, double_quant: bool) -> None:
    stack = packed(storage, double_quant, matrices((6, 20)))
    before = [stack.matrix(index, torch.float32).clone() for index in range(3)]
    stack.quantize_(1, torch.full((6, 20), 9.0))
    assert torch.equal(stack.matrix(0, torch.float32), before[0])
    assert torch.equal(stack.matrix(2, torch.float32), before[2])
    assert not torch.equal(stack.matrix(1, torch.float32), before[1])


@every_storage
def test_the_layout_of_the_weight_that_comes_in_does_not_matter(storage: Storage, double_quant: bool) -> None:
    weights = matrices((6, 20))
    straight = packed(storage, double_quant, weights)
    turned = packed(storage, double_quant, weights.transpose(1, 2).contiguous().transpose(1, 2))
    for (name, one), (_, other) in zip(straight.named_buffers(), turned.named_buffers(), strict=True):
        assert torch.equal(one, other), name


def test_a_meta_stack_stores_nothing_and_takes_meta_weights() -> None:
    stack = QuantizedExperts(2, (6, 20), "nf4", device="meta")
    stack.quantize_(0, torch.empty(6, 20, device="meta"))
    assert all(buffer.is_meta for buffer in stack.buffers())


def test_a_matrix_of_another_shape_is_refused() -> None:
    with pytest.raises(AssertionError, match="does not fit"):
        QuantizedExperts(1, (6, 20), "fp32").quantize_(0, torch.zeros(20, 6))


@pytest.mark.parametrize("storage", ["nf4", "int8", "mxfp4", "bf16", "fp32"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_linear_computes_with_the_unpacked_weight(storage: Storage, bias: bool) -> None:
    plain = nn.Linear(20, 6, bias=bias)
    layer = QuantizedLinear(plain.weight.detach(), plain.bias, storage)
    unpacked = layer.stack.matrix(0, torch.float32)
    x = torch.randn(2, 7, 20, requires_grad=True)
    expected = linear(x, unpacked, plain.bias)
    (expected_dx,) = torch.autograd.grad(expected.square().sum(), x)

    out = layer(x)
    (dx,) = torch.autograd.grad(out.square().sum(), x)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dx, expected_dx, rtol=1e-6, atol=1e-6)
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert [name for name, _ in layer.named_parameters()] == (["bias"] if bias else [])


def test_a_packed_linear_keeps_nothing_for_backward() -> None:
    layer = QuantizedLinear(torch.randn(6, 20), None, "int8")
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda _: None):
        layer(torch.randn(7, 20, requires_grad=True))
    assert saved == []


@pytest.mark.parametrize("storage", ["int8", "bf16"])
def test_the_bias_of_a_packed_linear_can_train(storage: Storage) -> None:
    weight, x = torch.randn(6, 8), torch.randn(2, 3, 8, requires_grad=True)
    linear = QuantizedLinear(weight, torch.zeros(6), storage)
    linear.bias.requires_grad_()
    (linear(x) * torch.arange(6.0)).sum().backward()
    assert torch.equal(linear.bias.grad, 6 * torch.arange(6.0))
