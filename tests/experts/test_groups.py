"""Experts in groups: the same output and gradients as one at a time, whatever the group, the storage and the routing.

The reference is the model's own experts module in float64, run by autograd on the bank's unpacked weights with the
low-rank factors merged in. Tolerances: 1e-5 relative in float32, 3e-2 in bfloat16.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from moetune.experts.bank import ExpertBank
from moetune.experts.quantized import QuantizedExperts, Storage
from tests.experts.test_bank import LAYOUTS, PLANS, UNUSED, bank_of, routed, run, stock_experts
from tests.reference import assert_close, expert_weights
from tests.thinned import in_pairs
from tests.toys import EXPERTS, HIDDEN

SIZES = [1, 2, 3, 5, EXPERTS]
ROUTINGS = {
    "as it falls": routed,
    "without some experts": lambda: routed(avoid=UNUSED),
    "without a group": lambda: routed(avoid=(0, 1, 2, 3)),
    "all to one expert": lambda: routed(avoid=tuple(range(1, EXPERTS)), top_k=1),
    "one token": lambda: tuple(tensor[:1] for tensor in routed()),
    "three choices": lambda: routed(top_k=3),
    "every expert": lambda: routed(top_k=EXPERTS),
}


def grouped(bank: ExpertBank, size: int, dtype: torch.dtype = torch.float32) -> ExpertBank:
    """The bank, with groups of at most so many."""
    largest = max(math.prod(bank.gate_up.shape), math.prod(bank.down.shape))
    bank.context = replace(bank.context, expert_memory=size * largest * dtype.itemsize)
    return bank


def reference(experts: nn.Module, bank: ExpertBank, routing: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    """Output and gradients in float64."""
    trained = dict(bank.named_parameters())
    leaves = {f"bank.{name}": p.detach().double().requires_grad_() for name, p in trained.items()}
    weights = {name: tensor.double() for name, tensor in expert_weights(bank, "bank", leaves).items()}
    x_TH, ids_TK, weights_TK = routing
    plain = copy.deepcopy(experts).double()

    def call(*args: Tensor) -> Tensor:
        return torch.func.functional_call(plain, weights, args)

    tensors = {name: leaves[f"bank.{name}"] for name in trained}
    return run(call, tensors, x_TH.double(), ids_TK, weights_TK.double())


@pytest.mark.parametrize(("model_type", "plan", "size"), in_pairs(LAYOUTS, PLANS, SIZES))
def test_groups_give_what_autograd_gives_in_float64(model_type: str, plan: str, size: int) -> None:
    experts = stock_experts(model_type)
    bank = grouped(bank_of(experts, PLANS[plan]), size)
    assert_close(run(bank, dict(bank.named_parameters()), *routed()), reference(experts, bank, routed()))


@pytest.mark.parametrize(("routing", "storage", "plan"), in_pairs(ROUTINGS, ["nf4", "int8", "mxfp4", "fp32"], PLANS))
def test_so_they_do_however_tokens_are_routed(routing: str, storage: Storage, plan: str) -> None:
    experts = stock_experts("mixtral")
    bank = grouped(bank_of(experts, PLANS[plan], storage), 4)
    given = ROUTINGS[routing]()
    assert_close(run(bank, dict(bank.named_parameters()), *given), reference(experts, bank, given))


@pytest.mark.parametrize("model_type", LAYOUTS)
@pytest.mark.parametrize("plan", ["fused LoRA on some", "trained, split LoRA, frozen"])
def test_so_they_do_in_bfloat16(plan: str, model_type: str) -> None:
    experts = stock_experts(model_type)
    bank = grouped(bank_of(experts, PLANS[plan], "bf16", torch.bfloat16), 3, torch.bfloat16)
    x_TH, ids_TK, weights_TK = routed()
    found = run(bank, dict(bank.named_parameters()), x_TH.bfloat16(), ids_TK, weights_TK)
    expected = reference(experts, bank, (x_TH.bfloat16(), ids_TK, weights_TK))
    # rounding decides on which side of gpt-oss's clamps a value is, and so whether it has a gradient
    assert_close(found, expected, tolerance=5e-2 if model_type == "gpt_oss" else 3e-2)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_a_second_run_and_kept_rows_change_no_bit(model_type: str, plan: str) -> None:
    bank = grouped(bank_of(stock_experts(model_type), PLANS[plan]), 3)
    trained = dict(bank.named_parameters())
    expected = run(bank, trained, *routed())
    again = run(bank, trained, *routed())
    bank.context = replace(bank.context, keep_rows=True)
    kept = run(bank, trained, *routed())
    for found in (again, kept):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_group_has_neighbours_of_one_kind_as_many_as_have_room() -> None:
    experts = stock_experts("mixtral")

    def of(plan: str, size: int) -> list[list[int]]:
        bank = grouped(bank_of(experts, PLANS[plan]), size)
        return [[bank.expert_order[slot] for slot in slots] for slots in bank.groups(torch.float32)]

    assert of("frozen", 0) == of("frozen", 1) == [[expert] for expert in range(EXPERTS)]
    assert of("frozen", 3) == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert of("frozen", EXPERTS) == of("frozen", 100) == [list(range(EXPERTS))]
    assert of("fused LoRA on some", 100) == [[0], [1, 2], [3, 4, 5], [6], [7]]
    assert of("all trained", 100) == [list(range(EXPERTS))]
    assert of("two trained", 100) == [[1, 2, 3, 4, 6, 7], [0, 5]]  # those that train whole are last, and no gap
    assert of("trained, split LoRA, frozen", 2) == [[1], [2, 3], [4, 6], [7], [0, 5]]
    assert of("trained, split LoRA, frozen", 100) == [[1], [2, 3, 4, 6], [7], [0, 5]]
    bank = grouped(bank_of(experts, PLANS["all trained"]), EXPERTS)
    with bank.hooks.using(gradient=lambda parameter, gradient: None):
        assert len(list(bank.groups(torch.float32))) == EXPERTS  # their gradients leave alone
    bank = grouped(bank_of(experts, PLANS["frozen"]), 2)
    assert len(list(bank.groups(torch.bfloat16))) == EXPERTS // 4  # half as wide


def test_eager_gradients_of_trained_experts_leave_one_at_a_time() -> None:
    bank = grouped(bank_of(stock_experts("mixtral"), PLANS["trained, fused LoRA, frozen"]), EXPERTS)
    trained = dict(bank.named_parameters())
    expected = run(bank, trained, *routed())
    found: dict[nn.Parameter, Tensor] = {}

    def take(parameter: nn.Parameter, gradient: Tensor) -> None:
        assert gradient.untyped_storage().nbytes() == gradient.nbytes
        found[parameter] = gradient

    x_TH, ids_TK, weights_TK = routed()
    with bank.hooks.using(gradient=take):
        y_TH = bank(x_TH.requires_grad_(), ids_TK, weights_TK)
        y_TH.backward(torch.linspace(-1, 1, y_TH.numel()).view_as(y_TH))
    whole = {name: parameter for name, parameter in trained.items() if name.startswith("trained.")}
    assert found.keys() == set(whole.values())
    assert all(torch.equal(found[parameter], expected[name]) for name, parameter in whole.items())
    assert torch.equal(bank.lora.gate_up_A.grad, expected["lora.gate_up_A"])


def test_rows_are_summed_for_each_token_in_one_order() -> None:
    """A token's rows in a group are not added at indices, which a GPU does in any order: they wait, and are summed."""
    bank = grouped(bank_of(stock_experts("mixtral"), PLANS["frozen"]), EXPERTS)
    added: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:
            added.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        run(bank, {}, *routed())
    assert not any("index_add" in name or "accumulate" in name for name in added)
    assert sum("sum_rows_" in name for name in added) == 2  # y, dx


SHAPES = [(256, 64), (64, 256), (96, 32), (24, 20), (256, 192)]  # whole blocks of blocks, whole blocks, neither


@pytest.mark.parametrize(
    ("storage", "double_quant"), [*product(["nf4"], [True, False]), ("int8", True), ("mxfp4", True), ("bf16", True)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_matrices_unpacked_together_are_those_unpacked_apart(
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


def test_no_token_at_all() -> None:
    bank = grouped(bank_of(stock_experts("mixtral"), PLANS["trained, fused LoRA, frozen"]), EXPERTS)
    empty = torch.zeros(0, HIDDEN), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2)
    found = run(bank, dict(bank.named_parameters()), *empty)
    assert all(not gradient.any() for gradient in found.values())
