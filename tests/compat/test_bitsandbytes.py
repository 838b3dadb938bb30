"""What is changed of bitsandbytes is still necessary and possible."""

import inspect
import subprocess
import sys
from typing import Any

import bitsandbytes.functional as bnb
import bitsandbytes.optim.optimizer
import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit
from torch import Tensor, nn

from moetune.compat.bitsandbytes import (
    SMALLEST_PAGED,
    _lazily,
    mend_dequantize_4bit,
    prepare_4bit,
    share_tables,
    update,
)


@pytest.mark.full
def test_importing_it_does_not_load_the_compiler() -> None:
    program = "import moetune.compat.bitsandbytes, sys; assert 'torch._inductor.compile_fx' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_it_compiles_is_compiled_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: made.append(options) or function)
    late = _lazily(lambda number: number + 1, dynamic=False)
    assert made == []
    assert [late(1), late(2)] == [2, 3]
    assert made == [{"dynamic": False}]


def optimizer() -> AdamW8bit:
    return AdamW8bit([nn.Parameter(torch.ones(4096))], lr=1e-3)


def test_each_8_bit_optimizer_makes_tables_of_its_own() -> None:
    one, other = optimizer(), optimizer()
    assert one.name2qmap is not other.name2qmap
    tables: dict[str, torch.Tensor] = {}
    for each in (one, other):
        share_tables(each, tables)
        each.param_groups[0]["params"][0].grad = torch.ones(4096)
        each.step()
    assert one.name2qmap.keys() == other.name2qmap.keys()
    assert all(other.name2qmap[name] is table for name, table in tables.items())


def test_a_4_bit_layer_may_repack_itself() -> None:
    linear = Linear4bit(64, 64)
    assert hasattr(linear, "support_avx512bf16_for_cpu")
    prepare_4bit(linear)
    assert not linear.support_avx512bf16_for_cpu


def test_paged_states_are_loaded_as_ours_are() -> None:
    assert "move_to_device" in inspect.signature(PagedAdamW8bit.load_state_dict).parameters
    assert str(SMALLEST_PAGED).replace("100000", "1e5") in inspect.getsource(PagedAdamW8bit.get_state_buffer)
    assert hasattr(PagedAdamW8bit([nn.Parameter(torch.ones(4))]).page_mng, "paged_tensors")


@pytest.mark.parametrize(("kind", "waits"), [(AdamW8bit, 0), (PagedAdamW8bit, 3)])
def test_an_update_waits_for_the_device_where_states_are_paged(
    kind: type[AdamW8bit], waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[torch.Tensor] = []
    monkeypatch.setattr(bitsandbytes.optim.optimizer, "sync_gpu", waited.append)
    parameters = [nn.Parameter(torch.ones(4096)) for _ in range(2)]
    made = kind(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.ones(4096)
    update(made)
    assert len(waited) == waits
    assert all((parameter != 1).all() for parameter in parameters)
    for parameter in parameters:
        parameter.grad = torch.ones(4096)
    made.step()
    assert len(waited) == waits + (2 if waits == 0 else 3), "bitsandbytes waits by itself no more"


SHAPES = [(64, 64), (64, 96), (6, 80), (5, 100), (5, 33)]


def by_hand(packed: Tensor, state: bnb.QuantState) -> Tensor:
    """The matrix, from the definition: two levels in a byte, high one first; one scale for 64 weights."""
    bytes_ = packed.flatten().long()
    levels = state.code[torch.stack([bytes_ >> 4, bytes_ & 15], 1).flatten()]
    weights = torch.Size(state.shape).numel()
    return (levels[:weights] * state.absmax.repeat_interleave(64)[:weights]).view(state.shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_comes_back_by_definition(shape: tuple[int, int]) -> None:
    mend_dequantize_4bit()
    packed, state = bnb.quantize_4bit(matrix(shape), quant_type="nf4")
    assert torch.equal(bnb.dequantize_4bit(packed, state), by_hand(packed, state))


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_4bit_multiplies_with_that_matrix(shape: tuple[int, int], double_quant: bool) -> None:
    """Forward, backward, and without gradients, which is another path in bitsandbytes."""
    layer = Linear4bit(shape[1], shape[0], bias=False, quant_type="nf4", compress_statistics=double_quant)
    layer.weight = Params4bit(matrix(shape), requires_grad=False, quant_type="nf4", compress_statistics=double_quant)
    layer.to("cpu")
    prepare_4bit(layer)
    packed, state = layer.weight.data, layer.weight.quant_state
    if double_quant:
        state = bnb.QuantState(
            bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset,
            shape=state.shape, code=state.code, blocksize=64, quant_type="nf4", dtype=torch.float32,
        )  # fmt: skip
    weight = by_hand(packed, state)
    x = torch.randn(3, shape[1], requires_grad=True)
    y = layer(x)
    torch.testing.assert_close(y, x @ weight.T)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], weight.sum(0).expand(3, -1))
    with torch.no_grad():
        torch.testing.assert_close(layer(x), x @ weight.T)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="upstream's kernel without AVX512 is right"
)
def test_upstream_is_still_wrong() -> None:
    """If this fails, delete `mend_dequantize_4bit` and its finding."""
    packed, state = bnb.quantize_4bit(matrix((64, 96)), quant_type="nf4")
    _, upstream = mend_dequantize_4bit()
    found = upstream(packed, state.absmax, 64, "nf4", state.shape, torch.float32)
    assert (found - by_hand(packed, state)).abs().max() > 1


def matrix(shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
