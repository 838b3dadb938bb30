"""A step's losses and gradients do not depend on how many experts are computed together, nor on whether the host waits
for their counts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moetune.experts import bank as bank_module
from moetune.experts.bank import ExpertBank
from tests.reference import build_toy
from tests.thinned import in_pairs
from tests.toys import toy_config
from tests.training.step.test_layer_by_layer import ADAPT, AUTO, TYPES, step


def losses_and_gradients(
    folder: Path, model_type: str, adapt: str, packing: bool, train: dict[str, Any]
) -> tuple[list[Tensor], dict[str, Tensor], list[int]]:
    """Run a step of three micro-batches on products that a GPU of 9.0 has; return losses, gradients, and the layer of
    each wait for counts."""
    adapted, waits = build_toy(toy_config(model_type), folder, ADAPT[adapt], model={"base": "nf4"}, train=train), []
    adapted.model.train()
    for bank in adapted.model.modules():
        if isinstance(bank, ExpertBank):
            bank.context = replace(bank.context, capability=(9, 0))
            bank.hooks.count_rows = lambda layer, ids, count, read: waits.append(layer) or read()
    done, gradients = step(adapted, packing)
    return [micro_step.loss for micro_step in done], gradients, waits


@pytest.mark.one_in(24)
@pytest.mark.parametrize(
    ("model_type", "checkpointing", "packing", "adapt"),
    in_pairs(TYPES, ["none", "full", "auto"], [False, True], ["lora", "all three ways"]),
)
def test_losses_and_gradients_are_those_of_one_expert_at_a_time(
    model_type: str, checkpointing: str, packing: bool, adapt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a wait bit for bit those with one; to 1e-6 of the largest gradient those of groups of one expert."""
    train = {"accumulate": 3, "checkpointing": AUTO if checkpointing == "auto" else checkpointing}
    made = (tmp_path, model_type, adapt, packing)
    losses, gradients, waits = losses_and_gradients(*made, {**train, "expert_memory": "1GiB"})
    assert waits
    one_by_one, others, _ = losses_and_gradients(*made, {**train, "expert_memory": "0"})
    monkeypatch.setattr(bank_module, "reads_ends", lambda *_: True)
    unwaited, the_same, waits = losses_and_gradients(*made, {**train, "expert_memory": "1GiB"})
    assert len(waits) == 0 or adapt != "lora"
    torch.testing.assert_close(one_by_one, losses, rtol=1e-6, atol=0)
    assert all(torch.equal(mine, loss) for mine, loss in zip(unwaited, losses, strict=True))
    assert gradients.keys() == others.keys() == the_same.keys() != set()
    for name, gradient in gradients.items():
        assert torch.equal(the_same[name], gradient), name
        torch.testing.assert_close(others[name], gradient, rtol=0, atol=1e-6 * float(gradient.abs().max()), msg=name)
