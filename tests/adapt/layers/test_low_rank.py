"""A linear layer with low-rank factors, as one operation, beside autograd through W·x + b + s·B·(A·x). Relative
tolerance 1e-5 in float32; a packed weight is compared with what it unpacks to."""

from collections.abc import Callable

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn

from moetune.adapt.layers.low_rank import FEW_ROWS, adapted, dequantized
from moetune.compat.bitsandbytes import prepare_4bit
from moetune.experts.quantized import QuantizedLinear

SCALE = 0.5


def plain(linear: nn.Linear) -> nn.Module:
    return linear


def packed(linear: nn.Linear) -> nn.Module:
    return QuantizedLinear(linear.weight.detach(), linear.bias, "int8")


def in_4_bits(nested: bool) -> Callable[[nn.Linear], nn.Module]:
    def make(linear: nn.Linear) -> nn.Module:
        made = Linear4bit(
            linear.in_features, linear.out_features, compute_dtype=torch.float32, compress_statistics=nested,
            quant_type="nf4",
        )  # fmt: skip
        made.load_state_dict(linear.state_dict())
        prepare_4bit(made)
        return made.to("cpu")

    return make


BASES = {"plain": plain, "int8": packed, "nf4": in_4_bits(False), "nf4, double": in_4_bits(True)}


@pytest.fixture(params=BASES)
def base(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return BASES[request.param](nn.Linear(128, 96)).requires_grad_(False)


def factors() -> tuple[nn.Linear, nn.Linear]:
    A, B = nn.Linear(128, 4, bias=False), nn.Linear(4, 96, bias=False)
    nn.init.normal_(B.weight)
    return A, B


@pytest.mark.parametrize("shape", [(2, 3), (2, FEW_ROWS)])
def test_output_and_gradients_are_those_of_autograd(base: nn.Module, shape: tuple[int, int]) -> None:
    A, B = factors()
    x = torch.randn(*shape, 128, requires_grad=True)
    weight = dequantized(base, torch.float32)
    expected = nn.functional.linear(x, weight, base.bias) + SCALE * (x @ A.weight.T @ B.weight.T)
    found = adapted(base, x, A, B, SCALE)
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    dout = torch.randn_like(expected)
    wanted = (x, A.weight, B.weight)
    gradients = (torch.autograd.grad(out, wanted, dout) for out in (found, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


def test_an_input_without_gradient_gets_none(base: nn.Module) -> None:
    A, B = factors()
    found = adapted(base, torch.randn(5, 128), A, B, SCALE)
    assert found is not None
    found.sum().backward()
    assert A.weight.grad is not None


def test_4_bits_are_unpacked_as_bitsandbytes_does() -> None:
    for nested in (False, True):
        linear = in_4_bits(nested)(nn.Linear(128, 96))
        theirs: Tensor = dequantize_4bit(linear.weight, linear.weight.quant_state)
        assert torch.equal(dequantized(linear, torch.float32), theirs)


def test_where_others_take_part_it_does_not() -> None:
    A, B = factors()
    base, x = nn.Linear(128, 96), torch.randn(5, 128)
    assert adapted(base, x, A, B, SCALE) is None  # it trains
    base.requires_grad_(False)
    assert adapted(nn.Bilinear(128, 128, 96), x, A, B, SCALE) is None
    handle = B.register_forward_hook(lambda module, args, out: out)
    assert adapted(base, x, A, B, SCALE) is None
    handle.remove()
    assert adapted(base, x, A, B, SCALE) is not None
