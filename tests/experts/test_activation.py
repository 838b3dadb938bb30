"""An activation is recognized by the numbers that it gives."""

import pytest
import torch
from torch import nn

from moetune.experts.activation import AutogradActivation, SwiGLU, recognize
from moetune.models.moe import ExpertShape
from tests.experts.banks import LAYOUTS, bank_of, stock_experts
from tests.toys import EXPERTS, HIDDEN

SHAPE = ExpertShape(EXPERTS, HIDDEN, 24, True, False, False, True)


def test_an_activation_is_known_by_the_numbers_that_it_gives() -> None:
    found = {model_type: bank_of(model_type, "frozen").activation for model_type in LAYOUTS}
    assert found["mixtral"] == SwiGLU(interleaved=False)
    experts = stock_experts("gpt_oss")
    assert found["gpt_oss"] == SwiGLU(True, experts.alpha, experts.limit)
    assert isinstance(found["nemotron_h"], AutogradActivation)  # has no gate


class Limited(nn.Module):
    """The limit has a name that nobody knows, so that only results tell."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.most = limit

    def act(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, 1)
        return nn.functional.silu(gate.clamp(max=self.most)) * up.clamp(-self.most, self.most)


@pytest.mark.parametrize(
    "function",
    [
        lambda rows: nn.functional.gelu(rows[:, :24]) * rows[:, 24:],
        lambda rows: nn.functional.silu(rows[:, 24:]) * rows[:, :24],
        *[Limited(limit).act for limit in (11.9, 12.0, 30_000.0)],  # a limit acts at any value
    ],
)
def test_any_other_runs_with_autograd(function: object) -> None:
    assert isinstance(recognize(function, SHAPE), AutogradActivation)
