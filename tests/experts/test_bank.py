"""What a bank holds, in which groups it computes, and what it asks its hooks."""

import threading

import pytest
import torch
from torch import Tensor, nn

from moetune.experts.bank import BankPlan, ExpertBank, LoraPlan
from moetune.experts.context import ReadCounts
from moetune.models.moe import ExpertShape
from tests.experts.banks import LAYOUTS, bank_of, routed
from tests.toys import EXPERTS, HIDDEN


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_only_what_trains_is_a_parameter(model_type: str) -> None:
    bank = bank_of(model_type, "trained, split LoRA, frozen")
    kinds = ["weight", "bias"] if bank.expert_shape.has_bias else ["weight"]
    whole = {f"trained.{e}.{part}.{kind}" for e in (0, 5) for part in ("gate_up", "down") for kind in kinds}
    factors = {f"lora.{part}_{factor}" for part in ("gate_up", "down") for factor in "AB"}
    assert dict(bank.named_parameters()).keys() == whole | factors
    assert list(bank_of(model_type, "frozen").parameters()) == []
    assert bank.gate_up.count == bank.down.count == EXPERTS - 2


@pytest.mark.parametrize("split", [False, True])
def test_factors_have_the_promised_size_and_start_without_effect(split: bool) -> None:
    shape = ExpertShape(EXPERTS, HIDDEN, 24, True, False, False, True)
    lora = ExpertBank(shape, BankPlan(lora=LoraPlan((1, 3), 4, 8.0, split)), nn.SiLU(), storage="fp32").lora
    assert lora is not None
    per_expert = 4 * ((2 if split else 1) * HIDDEN + 48) + 4 * (24 + HIDDEN)
    assert sum(parameter.numel() for parameter in lora.parameters()) == 2 * per_expert
    assert not lora.gate_up_B.any()
    assert not lora.down_B.any()
    for A in (lora.gate_up_A, lora.down_A):  # as PEFT draws them: uniform within 1/√in
        assert 0.8 / A.shape[-1] ** 0.5 < A.abs().max() <= 1 / A.shape[-1] ** 0.5
    assert {parameter.dtype for parameter in lora.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("plan", "room", "groups"),
    [
        ("frozen", 0, [[0], [1], [2], [3], [4], [5], [6], [7]]),
        ("frozen", 1, [[0], [1], [2], [3], [4], [5], [6], [7]]),
        ("frozen", 3, [[0, 1], [2, 3, 4], [5, 6, 7]]),
        ("frozen", 8, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("frozen", 100, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("fused LoRA on some", 100, [[0], [1, 2], [3, 4, 5], [6], [7]]),
        ("all trained", 100, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("two trained", 100, [[1, 2, 3, 4, 6, 7], [0, 5]]),  # fully trained ones are last and leave no gap
        ("trained, split LoRA, frozen", 2, [[1], [2, 3], [4, 6], [7], [0, 5]]),
        ("trained, split LoRA, frozen", 100, [[1], [2, 3, 4, 6], [7], [0, 5]]),
    ],
)
def test_a_group_has_experts_of_one_kind_as_many_as_have_room(plan: str, room: int, groups: list[list[int]]) -> None:
    bank = bank_of("mixtral", plan, group=room)
    found = [[bank.expert_order[slot] for slot in slots] for slots in bank.groups(torch.float32)]
    assert found == groups
    assert len(list(bank.groups(torch.float64))) >= len(groups)  # twice as wide
    with bank.hooks.using(gradient=lambda parameter, gradient: None):
        alone = [slots for slots in bank.groups(torch.float32) if bank.expert_order[slots[0]] in bank.plan.trained]
    assert len(alone) == len(bank.plan.trained)


def test_rows_are_counted_by_the_hook_on_every_thread() -> None:
    """Autograd recomputes on a thread of a GPU's own."""
    bank = bank_of("mixtral", "frozen")
    asked: list[int] = []

    def count_rows(layer: int, ids: Tensor, num_experts: int, read: ReadCounts) -> list[int]:
        asked.append(layer)
        return read()

    bank.layer = 7
    with bank.hooks.using(count_rows=count_rows):
        other = threading.Thread(target=bank, args=routed())
        other.start()
        other.join()
    bank(*routed())
    assert asked == [7]
