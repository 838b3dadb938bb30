"""The autograd node gives the outputs and gradients of the experts that it replaces, in groups of any size, whatever
their weights are and however tokens are routed. Tolerances: 1e-5 relative in float32, 3e-2 in bfloat16."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from moetune.adapt.guard.comparison import CallsSeen
from moetune.config.schema import Storage
from moetune.experts import bank as bank_module
from moetune.models.moe import read_shape
from tests.experts.banks import LAYOUTS, PLANS, UNUSED, bank_of, reference, routed, run, saved, stock_experts
from tests.reference import assert_close
from tests.thinned import in_pairs
from tests.toys import EXPERTS

ROUTINGS = {
    "as it falls": routed(),
    "without some experts": routed(avoid=UNUSED),
    "without a group": routed(avoid=(0, 1, 2, 3)),
    "all to one expert": routed(avoid=tuple(range(1, EXPERTS)), top_k=1),
    "one token": routed(tokens=1),
    "three choices": routed(top_k=3),
    "every expert": routed(top_k=EXPERTS),
}
STORAGES: list[Storage] = ["nf4", "int8", "fp8", "nvfp4", "mxfp4", "int4-g32", "bf16", "fp32"]


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    ("model_type", "plan", "group", "storage", "routing"),
    [
        *in_pairs(LAYOUTS, PLANS, [1, 2, 3, 5, EXPERTS], ["nf4"], ["as it falls"]),
        *in_pairs(["mixtral"], PLANS, [4], STORAGES, ROUTINGS),
        *in_pairs(LAYOUTS, ["trained, split LoRA, frozen"], [3], STORAGES[1:], ["without some experts"], every=1),
    ],
)
def test_output_and_gradients_equal_autograd_through_the_stock_experts(
    model_type: str, plan: str, group: int, storage: Storage, routing: str
) -> None:
    bank = bank_of(model_type, plan, storage, group=group)
    assert_close(run(bank, ROUTINGS[routing]), reference(model_type, bank, ROUTINGS[routing]))


@pytest.mark.parametrize("model_type", LAYOUTS)
@pytest.mark.parametrize("plan", ["fused LoRA on some", "split LoRA on some", "shared fused LoRA on some"])
def test_products_that_add_low_rank_terms(plan: str, model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose products are Triton's: one operator multiplies by W and by the second factor."""
    monkeypatch.setattr(bank_module, "is_in_triton", lambda capability, dtype: capability == (8, 6))
    operators = CallsSeen(lambda operator, args: called.append(operator.name) or operator.reference(*args))
    bank, called = bank_of(model_type, plan, group=3), []
    bank.context = replace(bank.context, capability=(8, 6))
    with operators:
        found = run(bank, routed())
    assert_close(found, reference(model_type, bank, routed()))
    assert called.count("low_rank_product_") == 3 + 2  # gate_up and down, gate_up again; of both the rows' gradients


@pytest.mark.one_in(6)
@pytest.mark.parametrize("model_type", LAYOUTS)
@pytest.mark.parametrize("plan", ["frozen", "LoRA on all"])
@pytest.mark.parametrize("routing", ["as it falls", "without some experts", "three choices"])
@pytest.mark.parametrize("keeps", [False, True])
def test_one_group_is_computed_without_counts_on_the_host(
    model_type: str, plan: str, routing: str, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU whose kernels read where each expert's rows end: the bits are those of the same group with counts."""
    bank, given = bank_of(model_type, plan, group=EXPERTS), ROUTINGS[routing]
    bank.context = replace(bank.context, keep_rows={bank.layer} if keeps else (), capability=(9, 0))
    called: list[int] = []
    monkeypatch.setattr(bank.hooks, "count_rows", lambda layer, ids, count, read: called.append(layer) or read())
    expected = run(bank, given)
    assert called == [bank.layer]
    monkeypatch.setattr(bank_module, "reads_ends", lambda *_: True)
    found = run(bank, given)
    assert called == [bank.layer]
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    nothing = run(bank, routed(tokens=0))
    assert not any(gradient.any() for gradient in nothing.values())
    bank.context = replace(bank.context, expert_memory=0)
    run(bank, given)
    assert called == [bank.layer] * 2


@pytest.mark.parametrize("model_type", LAYOUTS)
@pytest.mark.parametrize(
    ("plan", "group", "factors"),
    [
        ("fused LoRA on some", 3, torch.float32),
        ("trained, split LoRA, frozen", 1, torch.float32),
        ("split LoRA on some", 2, torch.bfloat16),
    ],
)
def test_bfloat16_rows_give_bfloat16_rows_and_factors_keep_their_dtype(
    plan: str, group: int, factors: torch.dtype, model_type: str
) -> None:
    bank = bank_of(model_type, plan, "bf16", torch.bfloat16, group=group)
    assert bank.lora is not None
    bank.lora.to(factors)
    x_TH, ids_TK, weights_TK = routed()
    found = run(bank, (x_TH.bfloat16(), ids_TK, weights_TK))
    assert found["y"].dtype == found["x"].dtype == torch.bfloat16
    assert found["weights"].dtype == torch.float32
    for name, parameter in bank.named_parameters():
        assert found[name].dtype == parameter.dtype == (factors if "lora" in name else torch.bfloat16)
    expected = reference(model_type, bank, (x_TH.bfloat16(), ids_TK, weights_TK))
    # rounding decides on which side of gpt-oss's clamps a value is, and so whether it has a gradient
    assert_close(found, expected, tolerance=5e-2 if model_type == "gpt_oss" else 3e-2)


def test_the_cases_above_are_unlike_and_a_clamp_acts() -> None:
    shapes = [read_shape(stock_experts(model_type), model_type) for model_type in LAYOUTS]
    for flag in ("has_gate", "has_bias", "is_transposed", "is_concatenated"):
        assert {getattr(shape, flag) for shape in shapes} == {True, False}, flag
    experts, (x_TH, _, _) = stock_experts("gpt_oss"), routed()
    assert ((x_TH @ experts.gate_up_proj[1] + experts.gate_up_proj_bias[1]).abs() > experts.limit).any()


@pytest.mark.parametrize("group", [1, EXPERTS])
def test_without_any_token_gradients_are_zero(group: int) -> None:
    found = run(bank_of("mixtral", "trained, fused LoRA, frozen", group=group), routed(tokens=0))
    assert not any(gradient.any() for gradient in found.values())


@pytest.mark.one_in(6)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_a_second_run_and_kept_rows_change_no_bit(model_type: str, plan: str, group: int) -> None:
    bank = bank_of(model_type, plan, group=group)
    expected, again = run(bank, routed()), run(bank, routed())
    bank.context = replace(bank.context, keep_rows={bank.layer})
    for found in (again, run(bank, routed())):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("keeps", [False, True])
def test_forward_keeps_input_routing_weights_and_order_and_with_keep_rows_those_of_gate_up(keeps: bool) -> None:
    bank, (x_TH, ids_TK, weights_TK) = bank_of("gpt_oss", "trained, split LoRA, frozen"), routed()
    bank.context = replace(bank.context, keep_rows={bank.layer} if keeps else {bank.layer + 1})
    inputs = [x_TH.shape, weights_TK.shape, (ids_TK.numel(),)]
    assert [tuple(tensor.shape) for tensor in saved(bank, routed())] == inputs
    y_TH = bank(x_TH.requires_grad_(), ids_TK, weights_TK)
    rows = y_TH.grad_fn.rows
    assert {tensor.shape[1] for tensor in rows} == ({bank.gate_up.shape[0]} if keeps else set())
    assert sum(len(tensor) for tensor in rows) == (ids_TK.numel() if keeps else 0)


def test_kept_rows_are_freed_group_by_group_and_a_second_backward_computes_them_again() -> None:
    bank, (x_TH, ids_TK, weights_TK) = bank_of("mixtral", "trained, fused LoRA, frozen"), routed()
    expected = run(bank, routed())
    bank.context = replace(bank.context, keep_rows={bank.layer})
    y_TH = bank(x_TH.requires_grad_(), ids_TK, weights_TK)
    rows = [weakref.ref(tensor) for tensor in y_TH.grad_fn.rows]
    alive: list[int] = []
    dy_TH = torch.linspace(-1, 1, y_TH.numel()).view_as(y_TH)
    with bank.hooks.using(group=lambda _: alive.append(sum(one() is not None for one in rows))):
        y_TH.backward(dy_TH, retain_graph=True)
    assert alive == [*range(len(rows), -1, -1)]
    x_TH.grad = None
    y_TH.backward(dy_TH)
    assert torch.equal(x_TH.grad, expected["x"])


@pytest.mark.parametrize("wanted", ["x", "weights"])
def test_gradients_may_be_wanted_of_one_input_alone(wanted: str) -> None:
    bank, (x_TH, ids_TK, weights_TK) = bank_of("mixtral", "frozen"), routed()
    full = run(bank, routed())
    inputs = {"x": x_TH, "weights": weights_TK}
    inputs[wanted].requires_grad_()
    y_TH = bank(x_TH, ids_TK, weights_TK)
    y_TH.backward(torch.linspace(-1, 1, y_TH.numel()).view_as(y_TH))
    torch.testing.assert_close(inputs[wanted].grad, full[wanted], rtol=0, atol=0)


def test_a_gradient_hook_gets_those_of_trained_experts_one_at_a_time() -> None:
    bank = bank_of("mixtral", "trained, fused LoRA, frozen", group=EXPERTS)
    trained = dict(bank.named_parameters())
    for avoid in ((), UNUSED):
        x_TH, ids_TK, weights_TK = routed(avoid)
        expected = run(bank, (x_TH, ids_TK, weights_TK))
        found: dict[nn.Parameter, Tensor] = {}

        def take(parameter: nn.Parameter, gradient: Tensor, found: dict[nn.Parameter, Tensor] = found) -> None:
            assert gradient.untyped_storage().nbytes() == gradient.nbytes
            found[parameter] = gradient

        bank.zero_grad()
        with bank.hooks.using(gradient=take):
            y_TH = bank(x_TH.requires_grad_(), ids_TK, weights_TK)
            y_TH.backward(torch.linspace(-1, 1, y_TH.numel()).view_as(y_TH))
        full = {name: parameter for name, parameter in trained.items() if name.startswith("trained.")}
        assert found.keys() == set(full.values())
        assert all(torch.equal(found[parameter], expected[name]) for name, parameter in full.items())
        assert torch.equal(bank.lora.gate_up_A.grad, expected["lora.gate_up_A"])


def test_rows_are_summed_for_each_token_in_one_order() -> None:
    """A token's rows in a group are not added at indices, which a GPU does in any order."""
    bank = bank_of("mixtral", "frozen", group=EXPERTS)
    operations: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            operations.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        run(bank, routed())
    assert not any("index_add" in name or "accumulate" in name for name in operations)
    assert sum("sum_rows_" in name for name in operations) == 2  # y, dx
