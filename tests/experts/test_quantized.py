"""Every storage holds exactly what bitsandbytes (or a cast) makes of each matrix, in exactly the promised bytes."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from moetune.config.schema import Storage
from moetune.experts.quantized import QuantizedExperts, QuantizedLinear
from moetune.run.dtypes import DTYPES
from tests.formats.stacks import SHAPES, matrices, quantized

STORAGES: list[tuple[Storage, bool]] = [
    ("nf4", False),
    ("nf4", True),
    ("int8", False),
    ("fp8", False),
    ("nvfp4", False),
    ("mxfp4", False),
    ("int4-g32", False),
    ("int4-row", False),
    ("int4-g128-order", False),
    ("fp8-row", False),
    ("fp8-tensor", False),
    ("mxfp8", False),
    ("bf16", False),
    ("fp32", False),
]

every_storage = pytest.mark.parametrize(("storage", "double_quant"), STORAGES)


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
        case "fp8-row" | "fp8-tensor" | "mxfp8":
            return weights + {"fp8-row": 4 * shape[0], "fp8-tensor": 4}.get(storage, shape[0] * -(-shape[1] // 32))
        case "nvfp4":
            return 9 * shape[0] * -(-shape[1] // 16) + 8
        case "mxfp4":
            return 17 * -(-weights // 32)
        case "int4-g32" | "int4-row" | "int4-g128-order":
            groups = {"int4-g32": -(-shape[1] // 32), "int4-row": 1, "int4-g128-order": -(-shape[1] // 128)}[storage]
            order = 2 * shape[1] if storage.endswith("order") else 0
            return shape[0] * (4 * -(-shape[1] // 8) + 2 * groups + -(-groups // 2)) + order + 1
        case _:
            return weights * DTYPES[storage].itemsize


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


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("storage", "double_quant"),
    [case for case in STORAGES if case[0] != "fp32"],
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


@pytest.mark.parametrize("storage", ["nf4", "int8", "fp8", "nvfp4", "mxfp4", "int4-g32", "bf16", "fp32"])
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
