"""No copy between host and device is used before it has arrived, and none overwrites what is still in use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moetune.config.schema import RunConfig
from tests.nullcuda import device, order, runs
from tests.resolved import measure


def on_host(model: Path, **train: Any) -> RunConfig:
    """Experts, layers' inputs and the optimizer's update on the host: every way there and back."""
    return runs.toy_run(
        model,
        "lora",
        model={"experts_on": "host"},
        train={"checkpointing": "offload", **train},
        optimizer={"name": "adamw", "offload": True},
    )


def logged(config: RunConfig, file: Path) -> list[order.Access]:
    with device.logging(file), order.Accesses():
        measure(config, "cuda", steps=2)
    return order.accesses(file)


def nothing(*arguments: Any) -> None:
    """Instead of a wait."""


@pytest.mark.parametrize("train", [{}, {"accumulate": 3, "layer_by_layer": True}], ids=["one", "layer by layer"])
def test_every_copy_is_waited_for(train: dict[str, Any], toy_model: Path, tmp_path: Path) -> None:
    found = logged(on_host(toy_model, **train), tmp_path / "log")
    copies = order.copies(found)
    assert len({access.who for access in copies}) >= 4, "experts, inputs out, inputs back, gradients and weights"
    assert len(copies) > 100
    assert not order.races(found)


@pytest.mark.parametrize(
    ("owner", "name", "replacement"),
    [
        (torch.cuda.Stream, "wait_event", nothing),  # whoever computes with a copy does not wait for it
        (torch.cuda.Stream, "wait_stream", nothing),  # copies do not wait for what they copy
        (torch.cuda.Event, "synchronize", nothing),  # the host reads gradients without waiting
    ],
    ids=["device", "source", "host"],
)
def test_a_wait_that_is_missing_is_found(
    owner: type, name: str, replacement: Callable[..., None], toy_model: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(owner, name, replacement)
    assert order.races(logged(on_host(toy_model), tmp_path / "log"))
