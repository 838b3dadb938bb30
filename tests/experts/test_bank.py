"""The hybrid stack against the experts it replaces: same output, same gradients, for every layout and mixture.

The reference is the model's own experts module, run by autograd on the bank's unpacked weights with the low-rank
factors merged in. Tolerance: 1e-5 relative, float32 (tests/reference.py).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from moetune.experts.activation import AutogradActivation, SwiGLU, recognize
from moetune.experts.bank import BankPlan, ExpertBank, LoraPlan
from moetune.experts.context import read_rows
from moetune.experts.permutation import Permutation
from moetune.experts.quantized import Storage
from moetune.models.moe import ExpertShape, read_shape
from moetune.models.structure import read_structure
from tests.reference import assert_close, excite_, expert_weights
from tests.toys import EXPERTS, HIDDEN, toy_model

# Together: gated or not, [out, in] or transposed, concatenated or interleaved, biases, a clamp in the gate.
LAYOUTS = ["mixtral", "gpt_oss", "nemotron_h", "aria_text"]
PLANS = {
    "frozen": BankPlan(),
    "two trained": BankPlan(trained=(0, 5)),
    "all trained": BankPlan(trained=tuple(range(EXPERTS))),
    "fused LoRA on some": BankPlan(lora=LoraPlan((1, 2, 6), rank=3, alpha=6.0)),
    "split LoRA on some": BankPlan(lora=LoraPlan((1, 2, 6), rank=3, alpha=6.0, split=True)),
    "trained, fused LoRA, frozen": BankPlan(trained=(0, 5), lora=LoraPlan((1, 7), rank=2, alpha=1.0)),
    "trained, split LoRA, frozen": BankPlan((0, 5), LoraPlan((1, 7), rank=2, alpha=1.0, split=True)),
}
UNUSED = (0, 7)  # one that trains whole and one with LoRA, in the mixtures
TOKENS = 24


@functools.cache
def stock_experts(model_type: str) -> nn.Module:
    """The first experts module of a toy, with weights large enough that a clamp in the gate acts."""
    model = toy_model(model_type)
    experts = model.get_submodule(read_structure(model).moe_layers[0].experts)
    experts.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.data.normal_(std=1.0 if model_type == "gpt_oss" else 0.3, generator=generator)
    return experts


def bank_of(
    experts: nn.Module, plan: BankPlan, storage: Storage = "nf4", dtype: torch.dtype = torch.float32
) -> ExpertBank:
    shape = read_shape(experts, "experts")
    torch.manual_seed(2)
    activation = experts._apply_gate if shape.has_gate else experts.act_fn
    bank = ExpertBank(shape, plan, activation, storage=storage, dtype=dtype)
    up = "gate_up_proj" if shape.has_gate else "up_proj"
    for expert in range(shape.num_experts):
        for part, name in (("gate_up", up), ("down", "down_proj")):
            weight = getattr(experts, name)[expert].detach()
            bank.put_(expert, part, weight.T if shape.is_transposed else weight)
            if shape.has_bias:
                bank.put_(expert, f"{part}_bias", getattr(experts, f"{name}_bias")[expert])
    excite_(bank)
    return bank


def routed(avoid: tuple[int, ...] = (), top_k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [T, H], chosen experts [T, K] without those in `avoid`, and their weights [T, K]."""
    generator = torch.Generator().manual_seed(1)
    x_TH = torch.randn(TOKENS, HIDDEN, generator=generator)
    scores_TE = torch.rand(TOKENS, EXPERTS, generator=generator)
    scores_TE[:, list(avoid)] = -1.0
    weights_TK, ids_TK = scores_TE.topk(top_k)
    return x_TH, ids_TK, weights_TK


def run(
    call: object, tensors: Mapping[str, Tensor], x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> dict[str, Tensor]:
    """The output, and the gradients of the rows, the routing weights and `tensors`."""
    x_TH, weights_TK = x_TH.clone().requires_grad_(), weights_TK.clone().requires_grad_()
    y_TH = call(x_TH, ids_TK, weights_TK)
    pull_TH = torch.linspace(-1, 1, y_TH.numel()).view_as(y_TH)
    inputs = {"x": x_TH, "weights": weights_TK, **tensors}
    gradients = torch.autograd.grad(y_TH, list(inputs.values()), pull_TH)
    return {"y": y_TH.detach(), **dict(zip(inputs, gradients, strict=True))}


def compare(experts: nn.Module, bank: ExpertBank, routing: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    trained = dict(bank.named_parameters())
    found = run(bank, trained, *routing)
    leaves = {f"bank.{name}": p.detach().clone().requires_grad_() for name, p in trained.items()}
    weights = expert_weights(bank, "bank", leaves)

    def reference(*args: Tensor) -> Tensor:
        return torch.func.functional_call(experts, weights, args)

    expected = run(reference, {name: leaves[f"bank.{name}"] for name in trained}, *routing)
    assert_close(found, expected)
    return found


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("model_type", LAYOUTS)
def test_output_and_gradients_equal_autograd_through_the_stock_experts(model_type: str, plan: BankPlan) -> None:
    experts = stock_experts(model_type)
    compare(experts, bank_of(experts, plan), routed())


@pytest.mark.parametrize("storage", ["int8", "mxfp4", "bf16", "fp32"])
@pytest.mark.parametrize("model_type", LAYOUTS)
def test_so_they_do_in_every_base_precision(model_type: str, storage: Storage) -> None:
    experts = stock_experts(model_type)
    compare(experts, bank_of(experts, PLANS["trained, split LoRA, frozen"], storage), routed())


def test_the_layouts_are_unlike() -> None:
    shapes = [read_shape(stock_experts(model_type), model_type) for model_type in LAYOUTS]
    for flag in ("has_gate", "has_bias", "is_transposed", "is_concatenated"):
        assert {getattr(shape, flag) for shape in shapes} == {True, False}, flag


def test_the_clamp_of_gpt_oss_acts_in_the_case_above() -> None:
    experts = stock_experts("gpt_oss")
    x_TH, _, _ = routed()
    gate_up = x_TH @ experts.gate_up_proj[1] + experts.gate_up_proj_bias[1]
    assert (gate_up.abs() > experts.limit).any()


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_experts_without_tokens_have_a_gradient_of_zero(model_type: str) -> None:
    experts = stock_experts(model_type)
    bank = bank_of(experts, PLANS["trained, split LoRA, frozen"])
    found = compare(experts, bank, routed(avoid=UNUSED))
    assert not any(gradient.any() for name, gradient in found.items() if name.startswith("trained.0."))
    assert found["trained.5.down.weight"].any()
    for name in ("lora.gate_up_A", "lora.gate_up_B", "lora.down_A", "lora.down_B"):
        assert found[name][0].any()
        assert not found[name][1].any()


def test_a_bank_that_no_token_reaches_still_gives_gradients() -> None:
    bank = bank_of(stock_experts("mixtral"), PLANS["trained, fused LoRA, frozen"])
    empty = torch.zeros(0, HIDDEN), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2)
    found = run(bank, dict(bank.named_parameters()), *empty)
    assert all(not gradient.any() for gradient in found.values())


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_only_what_trains_is_a_parameter(model_type: str) -> None:
    experts = stock_experts(model_type)
    shape = read_shape(experts, model_type)
    kinds = ["weight", "bias"] if shape.has_bias else ["weight"]
    whole = {f"trained.{e}.{part}.{kind}" for e in (0, 5) for part in ("gate_up", "down") for kind in kinds}
    factors = {f"lora.{part}_{factor}" for part in ("gate_up", "down") for factor in "AB"}
    bank = bank_of(experts, PLANS["trained, split LoRA, frozen"])
    assert dict(bank.named_parameters()).keys() == whole | factors
    assert list(bank_of(experts, PLANS["frozen"]).parameters()) == []
    assert bank.gate_up.count == bank.down.count == EXPERTS - 2


def test_an_activation_is_known_by_the_numbers_that_it_gives() -> None:
    gates = {model_type: bank_of(stock_experts(model_type), PLANS["frozen"]).activation for model_type in LAYOUTS}
    assert gates["mixtral"] == SwiGLU(interleaved=False)
    experts = stock_experts("gpt_oss")
    assert gates["gpt_oss"] == SwiGLU(True, experts.alpha, experts.limit)
    assert isinstance(gates["nemotron_h"], AutogradActivation)  # has no gate
    shape = ExpertShape(EXPERTS, HIDDEN, 24, True, False, False, True)
    gelu = nn.GELU()
    for other in (
        lambda rows: gelu(rows[:, :24]) * rows[:, 24:],
        lambda rows: nn.functional.silu(rows.chunk(2, 1)[1]) * rows.chunk(2, 1)[0],
    ):
        assert isinstance(recognize(other, shape), AutogradActivation)


@pytest.mark.parametrize("limit", [11.9, 12.0, 30_000.0])
def test_a_limit_holds_at_any_value(limit: float) -> None:
    class Limited(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.limit = limit

        def act(self, rows: torch.Tensor) -> torch.Tensor:
            gate, up = rows.chunk(2, 1)
            return nn.functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)

    shape = ExpertShape(EXPERTS, HIDDEN, 24, True, False, False, True)
    assert isinstance(recognize(Limited().act, shape), AutogradActivation)


@pytest.mark.parametrize("split", [False, True])
def test_factors_have_the_promised_size_and_start_without_effect(split: bool) -> None:
    shape = ExpertShape(EXPERTS, HIDDEN, 24, True, False, False, True)
    lora = ExpertBank(shape, BankPlan(lora=LoraPlan((1, 3), 4, 8.0, split)), nn.SiLU(), storage="fp32").lora
    assert lora is not None
    parts = 2 if split else 1
    per_expert = 4 * (parts * HIDDEN + 48) + 4 * (24 + HIDDEN)
    assert sum(parameter.numel() for parameter in lora.parameters()) == 2 * per_expert
    assert not lora.gate_up_B.any()
    assert not lora.down_B.any()
    for A in (lora.gate_up_A, lora.down_A):  # as PEFT draws them: uniform within 1/√in
        assert 0.8 / A.shape[-1] ** 0.5 < A.abs().max() <= 1 / A.shape[-1] ** 0.5
    assert {parameter.dtype for parameter in lora.parameters()} == {torch.float32}


def test_forward_keeps_input_routing_weights_and_order_and_nothing_else() -> None:
    bank = bank_of(stock_experts("gpt_oss"), PLANS["trained, split LoRA, frozen"])
    x_TH, ids_TK, weights_TK = routed()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda _: None):
        bank(x_TH.requires_grad_(), ids_TK, weights_TK)
    assert [tuple(tensor.shape) for tensor in saved] == [x_TH.shape, weights_TK.shape, (ids_TK.numel(),)]


@pytest.mark.parametrize("wanted", ["x", "weights"])
def test_gradients_that_nobody_asks_for_are_not_needed(wanted: str) -> None:
    experts = stock_experts("mixtral")
    bank = bank_of(experts, PLANS["frozen"])
    x_TH, ids_TK, weights_TK = routed()
    full = run(bank, {}, x_TH, ids_TK, weights_TK)
    inputs = {"x": x_TH.clone(), "weights": weights_TK.clone()}
    inputs[wanted].requires_grad_()
    y_TH = bank(inputs["x"], ids_TK, inputs["weights"])
    y_TH.backward(torch.linspace(-1, 1, y_TH.numel()).view_as(y_TH))
    torch.testing.assert_close(inputs[wanted].grad, full[wanted], rtol=0, atol=0)


def test_bfloat16_rows_give_bfloat16_rows_and_factors_keep_float32() -> None:
    experts = stock_experts("mixtral")
    plan = PLANS["trained, split LoRA, frozen"]
    x_TH, ids_TK, weights_TK = routed()
    exact = compare(experts, bank_of(experts, plan, "bf16"), (x_TH, ids_TK, weights_TK))
    bank = bank_of(experts, plan, "bf16", torch.bfloat16)
    parameters = dict(bank.named_parameters())
    found = run(bank, parameters, x_TH.bfloat16(), ids_TK, weights_TK)
    assert found["y"].dtype == found["x"].dtype == torch.bfloat16
    assert found["weights"].dtype == torch.float32
    for name, parameter in parameters.items():
        assert found[name].dtype == parameter.dtype == (torch.float32 if "lora" in name else torch.bfloat16)
    assert_close({name: tensor.float() for name, tensor in found.items()}, exact, tolerance=3e-2)


def test_routing_groups_every_row_under_its_expert() -> None:
    bank = bank_of(stock_experts("mixtral"), PLANS["frozen"])
    ids_TK = torch.tensor([[3, 1], [1, 0], [3, 0], [1, 3]])
    counts = read_rows(0, ids_TK, EXPERTS)
    assert counts == [2, 3, 0, 3, 0, 0, 0, 0]
    routing = Permutation.of(ids_TK, counts)
    groups = {group.slots.start: group for group in routing.groups(bank.groups(torch.float32))}
    assert {slot: group.order.tolist() for slot, group in groups.items()} == {0: [3, 5], 1: [1, 2, 6], 3: [0, 4, 7]}
    assert all(torch.equal(group.order, routing.order[group.at]) for group in groups.values())


def test_rows_are_counted_so_on_every_thread() -> None:
    """Autograd recomputes on a thread of a GPU's own."""
    bank = bank_of(stock_experts("mixtral"), PLANS["frozen"])
    x_TH, ids_TK, weights_TK = routed()
    asked: list[int] = []

    def count_rows(layer: int, ids: Tensor, num_experts: int) -> list[int]:
        asked.append(layer)
        return read_rows(layer, ids, num_experts)

    bank.layer = 7
    with bank.hooks.using(count_rows=count_rows):
        other = threading.Thread(target=bank, args=(x_TH, ids_TK, weights_TK))
        other.start()
        other.join()
    bank(x_TH, ids_TK, weights_TK)
    assert asked == [7]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("model_type", LAYOUTS)
def test_kept_rows_spare_a_product_and_change_no_bit(model_type: str, plan: BankPlan) -> None:
    bank = bank_of(stock_experts(model_type), plan)
    trained = dict(bank.named_parameters())
    expected = run(bank, trained, *routed())
    bank.context = replace(bank.context, keep_rows=True)
    found = run(bank, trained, *routed())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_bank_that_keeps_rows_keeps_those_of_gate_up() -> None:
    bank = bank_of(stock_experts("mixtral"), PLANS["frozen"])
    bank.context = replace(bank.context, keep_rows=True)
    x_TH, ids_TK, weights_TK = routed()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor), lambda _: None):
        bank(x_TH.requires_grad_(), ids_TK, weights_TK)
        rows = saved[3:]
        with torch.no_grad():
            bank(x_TH, ids_TK, weights_TK)
    assert saved[3:] == rows
    assert {tensor.shape[1] for tensor in rows} == {bank.gate_up.shape[0]}
    assert sum(len(tensor) for tensor in rows) == ids_TK.numel()
