"""Which parameters an optimizer holds, with which decay, and what its update is."""

from typing import Any

import pytest
import torch

from moetune.config.schema import OptimizerConfig
from moetune.training.optim.optimizers import optimizer_maker

NAMES = ("adamw", "adamw8bit", "sgd")


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((64, 80), (3, 8, 8), (7,))]


def step(optimizer: torch.optim.Optimizer, trained: list[torch.nn.Parameter]) -> None:
    for parameter in trained:
        parameter.grad = torch.cos(parameter.detach())
    optimizer.step()


@pytest.mark.parametrize("name", NAMES)
def test_only_matrices_decay(name: Any) -> None:
    trained = parameters()
    optimizer = optimizer_maker(OptimizerConfig(name=name, lr=0.1, weight_decay=0.5))(trained)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decay[id(parameter)] for parameter in trained] == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("name", NAMES)
def test_a_group_without_parameters_is_left_out(name: Any) -> None:
    assert len(optimizer_maker(OptimizerConfig(name=name))(parameters()[:1]).param_groups) == 1


@pytest.mark.parametrize(
    ("name", "torchs", "settings"),
    [
        ("adamw", torch.optim.AdamW, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}),
        ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_settings_are_those_of_the_run_file(name: Any, torchs: Any, settings: dict[str, Any]) -> None:
    trained, expected = parameters(), parameters()
    optimizer = optimizer_maker(OptimizerConfig(name=name, weight_decay=0.5, **settings))(trained)
    groups = [{"params": expected[:2], "weight_decay": 0.5}, {"params": expected[2:], "weight_decay": 0.0}]
    reference = torchs(groups, **settings)
    for _ in range(2):
        step(optimizer, trained)
        step(reference, expected)
    torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-6)


def test_adamw8bit_is_adamw_with_states_in_a_byte() -> None:
    settings = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}
    trained, reference = parameters(), parameters()
    quantized = optimizer_maker(OptimizerConfig(name="adamw8bit", **settings))(trained)
    exact = optimizer_maker(OptimizerConfig(name="adamw", **settings))(reference)
    for _ in range(3):
        step(quantized, trained)
        step(exact, reference)
    moved = (reference[0] - parameters()[0]).abs().mean()
    assert 0 < (trained[0] - reference[0]).abs().mean() < 0.02 * moved
    states = quantized.state[trained[0]]
    assert {states["state1"].dtype, states["state2"].dtype} == {torch.uint8}
