"""Every storage holds exactly what bitsandbytes (or a cast) makes of each matrix, in exactly the promised bytes."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moetune.experts import rounding
from moetune.experts.quantized import QuantizedExperts, QuantizedLinear, Storage
from moetune.kernels import operators as kernels
from moetune.run.dtypes import DTYPES

STORAGES: list[tuple[Storage, bool]] = [
    ("nf4", False),
    ("nf4", True),
    ("int8", False),
    ("fp8", False),
    ("nvfp4", False),
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


def quantized(storage: Storage, double_quant: bool, weights: Tensor) -> QuantizedExperts:
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
        case "fp8":
            return weights + 4 * -(-shape[0] // 128) * -(-shape[1] // 128)
        case "nvfp4":
            return 9 * shape[0] * -(-shape[1] // 16) + 8
        case "mxfp4":
            return 17 * -(-weights // 32)
        case _:
            return weights * DTYPES[storage].itemsize


@every_shape
@pytest.mark.parametrize("double_quant", [False, True])
def test_an_nf4_slice_is_what_bitsandbytes_makes_of_that_matrix(shape: tuple[int, int], double_quant: bool) -> None:
    weights = matrices(shape)
    stack = quantized("nf4", double_quant, weights)
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
    stack = quantized("int8", False, weights)
    for index, weight in enumerate(weights):
        data, scale, _ = bnb.int8_vectorwise_quant(weight.half())
        assert torch.equal(stack.data[index], data)
        assert torch.equal(stack.absmax[index], scale)
        assert torch.equal(stack.matrix(index, torch.float32), bnb.int8_vectorwise_dequant(data, scale))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("at_once", [kernels.MXFP4_AT_ONCE, 96])
def test_mxfp4_is_dequantized_as_transformers_does(
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
    stack = quantized("mxfp4", False, weights[None])
    nearest = (weights.abs()[..., None] - levels).abs().amin(-1)
    assert torch.equal((stack.matrix(0, torch.float32) - weights).abs(), nearest)
    assert torch.equal(quantized("mxfp4", False, weights[None] * 2**-20).data, stack.data)

    ties = torch.tensor([[6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, *[0.0] * 24]])
    assert quantized("mxfp4", False, ties[None]).matrix(0, torch.float32)[0, :8].tolist() == [6, 0, 1, 1, 2, 2, 4, 4]

    blocks = torch.randint(0, 256, (1, 40, 4, 16), dtype=torch.uint8)
    scales = torch.randint(3, 250, (1, 40, 4), dtype=torch.uint8)
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).mT
    assert torch.equal(quantized("mxfp4", False, values).matrix(0, torch.float32), values[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fp8_is_dequantized_as_transformers_does(dtype: torch.dtype) -> None:
    """Of every byte, two blocks high and three wide, to the bit."""
    codes = torch.arange(256, dtype=torch.uint8)[torch.randperm(256 * 384) % 256].view(1, 256, 384)
    scales = torch.randn(1, 2, 3)
    stack = QuantizedExperts(1, (256, 384), "fp8")
    stack.put_quantized_(0, {"data": codes[0], "scales": scales[0]})
    expected = Fp8Dequantize(None)._dequantize_one(codes.view(torch.float8_e4m3fn), scales, dtype)
    torch.testing.assert_close(stack.matrix(0, dtype), expected[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("at_once", [kernels.INT8_AT_ONCE, 1])
@pytest.mark.parametrize("pieces", [1, 2])
def test_fp8_is_quantized_as_transformers_does(pieces: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up together or apart; and blocks that are cut off as whole ones whose other weights are zero."""
    monkeypatch.setattr(rounding, "INT8_AT_ONCE", at_once)
    stock: Any = Fp8Quantize(SimpleNamespace(quantization_config=FineGrainedFP8Config()))
    weight = matrices((512, 384), 1)[0].to(torch.bfloat16)
    weight[:128, :128] = 0
    stack = QuantizedExperts(1, (512, 384), "fp8", pieces=pieces)
    stack.quantize_(0, weight)
    expected = stock._quantize_one("weight", weight)
    assert torch.equal(stack.data.view(512, 384), expected["weight"].view(torch.uint8))
    assert torch.equal(stack.scales.view(4, 3), expected["weight_scale_inv"])

    cut = QuantizedExperts(1, (300, 200), "fp8")
    cut.quantize_(0, weight[200:500, :200])
    whole = torch.zeros(384, 256, dtype=torch.bfloat16)
    whole[:300, :200] = weight[200:500, :200]
    expected = stock._quantize_one("weight", whole)
    assert torch.equal(cut.data[0], expected["weight"].view(torch.uint8)[:300, :200])
    assert torch.equal(cut.scales[0], expected["weight_scale_inv"])


LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.mark.parametrize("at_once", [kernels.INT8_AT_ONCE, 1])
@pytest.mark.parametrize("producer", ["modelopt", "compressed-tensors"])
def test_nvfp4_is_dequantized_as_its_producers_do(producer: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte with every positive scale, by the formulas of modelopt/torch/quantization/qtensor/nvfp4_tensor.py
    (0.47) and compressed_tensors/quantization/lifecycle/forward_helpers.py (0.20)."""
    monkeypatch.setattr(kernels, "INT8_AT_ONCE", at_once)
    codes = torch.arange(256, dtype=torch.uint8).repeat(127).view(127, 256)
    scales = torch.arange(127, dtype=torch.uint8)[:, None].expand(127, 32).contiguous()
    values = LEVELS[torch.stack([codes & 15, codes >> 4], -1).int()].view(127, 32, 16)
    of_matrix = torch.tensor(0.00123)
    of_blocks = scales.view(torch.float8_e4m3fn)
    if producer == "modelopt":
        of_blocks, fraction = of_blocks.float() * of_matrix, [of_matrix, 1.0]
    else:
        of_blocks, fraction = of_blocks.bfloat16() / (1 / of_matrix.view(1)), [1.0, 1 / of_matrix]
    stack = QuantizedExperts(1, (127, 512), "nvfp4")
    stack.put_quantized_(0, {"data": codes, "scales": scales, "fractions": torch.tensor(fraction)})
    expected = (values * of_blocks[..., None]).flatten(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(stack.matrix(0, dtype), expected.to(dtype))


@pytest.mark.parametrize("at_once", [kernels.INT8_AT_ONCE, 1])
def test_nvfp4_rounds_to_the_nearest(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a largest magnitude of 2,688 the global scale is 1; a row that is cut off is one with zeros."""
    monkeypatch.setattr(rounding, "INT8_AT_ONCE", at_once)
    weights = torch.linspace(-6, 6, 1600).view(100, 16) * 448
    weights[:, 0] = 6.0 * 448
    found = quantized("nvfp4", False, weights[None])
    assert found.fractions.tolist() == [[1.0, 1.0]]
    nearest = (weights.abs()[..., None] - LEVELS[:8] * 448).abs().amin(-1)
    assert torch.equal((found.matrix(0, torch.float32) - weights).abs(), nearest)
    ties = torch.tensor([[6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, *[0.0] * 8]]) * 448
    assert (quantized("nvfp4", False, ties[None]).matrix(0, torch.float32)[0, :8] / 448).tolist() == [
        6, 0, 1, 1, 2, 2, 4, 4,
    ]  # fmt: skip

    small = matrices((33, 20), 1)
    cut, whole = quantized("nvfp4", False, small), quantized("nvfp4", False, nn.functional.pad(small, (0, 12)))
    assert torch.equal(cut.matrix(0, torch.float32), whole.matrix(0, torch.float32)[:, :20])
    assert (cut.matrix(0, torch.float32) - small[0]).norm() < 0.12 * small[0].norm()
    zeros = quantized("nvfp4", False, torch.zeros(1, 3, 16))
    assert not zeros.matrix(0, torch.float32).any()


@every_shape
@pytest.mark.parametrize("storage", ["bf16", "fp32"])
def test_a_plain_slice_is_a_cast(shape: tuple[int, int], storage: Storage) -> None:
    weights = matrices(shape)
    stack = quantized(storage, False, weights)
    for index, weight in enumerate(weights):
        assert torch.equal(stack.matrix(index, torch.float32), weight.to(DTYPES[storage]).float())


@pytest.mark.parametrize("shape", [*SHAPES, (14336, 4096)])
@every_storage
def test_the_buffers_take_the_promised_bytes(shape: tuple[int, int], storage: Storage, double_quant: bool) -> None:
    for device in ("cpu", "meta") if shape in SHAPES else ("meta",):
        stack = QuantizedExperts(3, shape, storage, double_quant=double_quant, device=device)
        shared = {"nf4": 256 * 4 * double_quant, "mxfp4": 2 * 256 * 4}.get(storage, 0)  # tables, once a stack
        assert sum(b.nbytes for b in stack.buffers()) == 3 * matrix_bytes(storage, double_quant, shape) + shared


@every_storage
def test_a_matrix_is_stored_alone_and_comes_back_from_a_state_dict(storage: Storage, double_quant: bool) -> None:
    weights = matrices((6, 20))
    stack = quantized(storage, double_quant, weights)
    assert list(stack.parameters()) == []
    assert stack.state_dict().keys() == dict(stack.named_buffers()).keys()
    restored = QuantizedExperts(3, (6, 20), storage, double_quant=double_quant)
    restored.load_state_dict(stack.state_dict())
    restored.quantize_(1, torch.full((6, 20), 9.0))
    same = [torch.equal(restored.matrix(i, torch.float32), stack.matrix(i, torch.float32)) for i in range(3)]
    assert same == [True, False, True]

    turned = quantized(storage, double_quant, weights.mT.contiguous().mT)  # its layout does not matter
    for (name, one), (_, other) in zip(stack.named_buffers(), turned.named_buffers(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(
    ("storage", "double_quant"),
    [*product(["nf4"], [True, False]), ("int8", True), ("fp8", True), ("nvfp4", True), ("mxfp4", True), ("bf16", True)],
)
@pytest.mark.parametrize("shape", [(256, 64), (64, 256), (96, 32), (24, 20), (256, 192)])  # whole blocks, and not
def test_matrices_dequantized_together_are_those_dequantized_apart(
    shape: tuple[int, int], storage: Storage, double_quant: bool
) -> None:
    stack = QuantizedExperts(5, shape, storage, double_quant=double_quant)
    generator = torch.Generator().manual_seed(0)
    for number in range(5):
        stack.quantize_(number, torch.randn(shape, generator=generator))
    for dtype in (torch.float32, torch.bfloat16):
        together = stack.matrices(slice(1, 4), dtype)
        assert together.shape == (3, *shape)
        assert all(torch.equal(together[n], stack.matrix(1 + n, dtype)) for n in range(3))


def test_a_meta_stack_stores_nothing_and_another_shape_is_refused() -> None:
    stack = QuantizedExperts(2, (6, 20), "nf4", device="meta")
    stack.quantize_(0, torch.empty(6, 20, device="meta"))
    assert all(buffer.is_meta for buffer in stack.buffers())
    with pytest.raises(AssertionError, match="does not fit"):
        QuantizedExperts(1, (6, 20), "fp32").quantize_(0, torch.zeros(20, 6))


@pytest.mark.parametrize("storage", ["nf4", "int8", "fp8", "nvfp4", "mxfp4", "bf16", "fp32"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_quantized_linear_computes_with_its_weight_and_keeps_nothing(storage: Storage, bias: bool) -> None:
    plain = nn.Linear(20, 6, bias=bias)
    layer = QuantizedLinear(plain.weight.detach(), plain.bias, storage)
    weight = layer.stack.matrix(0, torch.float32)
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert [name for name, _ in layer.named_parameters()] == (["bias"] if bias else [])
    layer.requires_grad_()  # a bias may train
    x, saved = torch.randn(2, 7, 20, requires_grad=True), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda _: None):
        layer(x)
    assert saved == []
    found, expected = layer(x), linear(x, weight, plain.bias)
    for (name, parameter), other in zip([("x", x), *layer.named_parameters()], [x, plain.bias], strict=False):
        one = torch.autograd.grad(found.square().sum(), parameter, retain_graph=True)
        torch.testing.assert_close(
            one, torch.autograd.grad(expected.square().sum(), other, retain_graph=True), rtol=1e-5, atol=1e-5, msg=name
        )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
