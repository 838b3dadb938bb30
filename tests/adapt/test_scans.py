"""Hyper-connections that keep only their inputs: losses and gradients are those of transformers' own.

Tolerance: relative, of the norm of each gradient or of a thousandth of the largest one's, in float32: the gradients of
a residual are summed in another order.
"""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from moetune.adapt.scans import recompute_scans
from moetune.compat.transformers import is_hyper_connection
from moetune.memory.trace.tracker import Tracker
from tests.thinned import thinned
from tests.toys import VOCAB, toy_model


def stepped(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor], int]:
    ids = torch.randint(3, VOCAB, (2, 24), generator=torch.Generator().manual_seed(5))
    with Tracker({}) as tracker:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return loss.detach(), gradients, tracker.peak_bytes


@pytest.mark.one_in(2)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("model_type", thinned(("deepseek_v4", "hy_v4")))
def test_hyper_connections_that_are_computed_once_more(model_type: str, checkpointing: bool) -> None:
    models = toy_model(model_type), toy_model(model_type)
    recompute_scans(models[1])
    for model in models:
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    (loss, gradients, peak), (recomputed, others, less) = map(stepped, models)
    assert torch.equal(loss, recomputed)
    assert gradients.keys() == others.keys()
    least = 1e-3 * max(gradient.norm() for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert (others[name] - gradient).norm() <= 1e-5 * gradient.norm().clamp(min=least), name
    assert any(map(is_hyper_connection, models[1].modules()))
    assert checkpointing or less < peak
