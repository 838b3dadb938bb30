"""An adapted model as it was before training, in place of a second model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moetune.adapt.build import Adapted
from moetune.adapt.reference import Reference
from moetune.experts.host import stays_on_host
from tests import reference
from tests.reference import excite_, token_ids
from tests.toys import toy_config

ADAPT = {
    "router": {"router": "all"},
    "experts": {"experts": {"layers": "1", "ids": [0, 2]}, "also": ["norm"]},
    "lora": {"lora": {"rank": 2, "alpha": 32, "targets": ["attention", "experts"], "ids": [1, 3]}},
    "lora on routers": {"lora": {"rank": 2, "alpha": 32, "targets": ["router"]}},
}


def an_adapted(folder: Path, adapt: dict[str, Any], **sections: Any) -> Adapted:
    return reference.build_toy(toy_config("mixtral", num_hidden_layers=2), folder, adapt, **sections)


@torch.no_grad()
def disturb_(adapted: Adapted) -> None:
    generator = torch.Generator().manual_seed(5)
    for parameter in adapted.trainable().values():
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def logits(adapted: Adapted) -> Tensor:
    return adapted.model(token_ids(), use_cache=False).logits


@pytest.mark.one_in(3)
@pytest.mark.parametrize("starts_at_zero", [True, False])
@pytest.mark.parametrize("part", ADAPT)
def test_it_computes_what_the_model_was(part: str, starts_at_zero: bool, tmp_path: Path) -> None:
    adapted = an_adapted(tmp_path, ADAPT[part])
    if starts_at_zero:
        with torch.no_grad():
            for name, parameter in adapted.trainable().items():
                if adapted.part_of(name) == "lora" and ("_B" in name):
                    parameter.zero_()
    first = logits(adapted)
    kept = Reference(adapted)
    switched_off = "lora" in part and starts_at_zero
    assert [p for p, _ in kept.copies] == ([] if switched_off else [*adapted.trainable().values()])
    disturb_(adapted)
    adapted.model.train()
    values = {name: parameter.detach().clone() for name, parameter in adapted.trainable().items()}
    trained = logits(adapted)
    assert (trained - first).abs().max() > 1e-3
    with kept.active():
        assert not adapted.model.training
        torch.testing.assert_close(logits(adapted), first, rtol=0, atol=1e-6)
        with kept.active():  # as PEFT's contexts may be entered twice
            torch.testing.assert_close(logits(adapted), first, rtol=0, atol=1e-6)
        torch.testing.assert_close(logits(adapted), first, rtol=0, atol=1e-6)
    assert adapted.model.training
    assert logits(adapted).equal(trained)
    for name, parameter in adapted.trainable().items():
        assert parameter.requires_grad
        assert parameter.equal(values[name])


SETTINGS: dict[str, dict[str, Any]] = {
    "checkpointed": {"train": {"checkpointing": "full"}},
    "inputs on the host": {"train": {"checkpointing": "offload"}},
    "kept rows": {"train": {"checkpointing": "full", "keep_rows": 1}},
    "experts on the host": {"train": {"checkpointing": "full"}, "model": {"experts_on": "host"}},
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("part", ["router", "experts", "lora"])
def test_between_forward_and_backward(part: str, settings: str, tmp_path: Path) -> None:
    """A reference pass chooses experts for itself, and leaves the stored choices of the model that trains alone."""
    adapted = an_adapted(tmp_path, ADAPT[part] | ADAPT["router"], **SETTINGS[settings])
    kept = Reference(adapted)
    disturb_(adapted)
    adapted.model.train()
    gradients: list[dict[str, Tensor]] = []
    for with_reference in (False, True):
        adapted.model.zero_grad(set_to_none=True)
        loss = adapted.model(token_ids(), use_cache=False).logits.square().mean()
        if with_reference:
            with torch.no_grad(), kept.active():
                adapted.model(token_ids(seed=4), use_cache=False)
        loss.backward()
        gradients.append({n: p.grad.clone() for n, p in adapted.trainable().items() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() != set()
    for name, gradient in gradients[0].items():
        assert gradient.equal(gradients[1][name]), name


def test_a_pass_that_fails_changes_nothing(tmp_path: Path) -> None:
    adapted = an_adapted(tmp_path, ADAPT["experts"])
    kept = Reference(adapted)
    excite_(adapted.model)
    disturb_(adapted)
    trained = logits(adapted)
    with pytest.raises(ValueError, match="in between"), kept.active():
        raise ValueError("in between")
    assert logits(adapted).equal(trained)


def test_copies_are_on_the_host(tmp_path: Path) -> None:
    adapted = an_adapted(tmp_path, ADAPT["experts"])
    kept = Reference(adapted)
    copies = [copy for _, copy in kept.copies]
    assert len(copies) == len(adapted.trainable())
    assert all(stays_on_host(copy) and not isinstance(copy, nn.Parameter) for copy in copies)
