"""The training step: one micro-batch of four is four of one, whatever the lengths; losses count tokens, not batches."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from moetune.adapt.build import Adapted
from moetune.config.schema import RunConfig
from moetune.training.data.load import load_data
from moetune.training.step.batch import Batch, collate
from moetune.training.step.loss import IGNORED
from moetune.training.step.micro_step import count_loss_tokens, forward_pass, token_loss
from moetune.training.step.router_losses import RouterWatch
from tests import small
from tests.resolved import build
from tests.thinned import in_pairs

PAD = 3


def rows_of(config: RunConfig) -> list[dict[str, list[int]]]:
    assert config.data is not None
    return list(load_data(config.data, AutoTokenizer.from_pretrained(config.model.path), config.train).train)


def step(
    adapted: Adapted, watch: RouterWatch, batches: list[Batch], config: RunConfig
) -> tuple[Tensor, dict[int, Tensor]]:
    """Gradients of one step, its loss, and the expert load."""
    total = sum(int(count_loss_tokens(batch)) for batch in batches)
    losses, done = zip(*(forward_pass(adapted.model, b, total, watch, config.train) for b in batches), strict=True)
    for loss in losses:
        loss.backward()
    load = {layer: torch.stack([micro.load[layer] for micro in done]).sum(0) for layer in done[0].load}
    return torch.stack([micro.loss for micro in done]).sum(), load


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("adapt", "checkpointing"), in_pairs(small.ADAPT, ["none", "full"], every=2))
def test_batch_of_four_is_four_of_one(
    adapt: str, checkpointing: str, configure: small.Configure, tmp_path: Path
) -> None:
    config = configure(adapt, output=tmp_path, train={"checkpointing": checkpointing})
    rows = rows_of(config)
    one, four = build(config, "cpu"), build(config, "cpu")
    watches = RouterWatch(one), RouterWatch(four)
    optimizers = [torch.optim.SGD(adapted.trainable().values(), lr=0.5, momentum=0.9) for adapted in (one, four)]
    start = {name: parameter.detach().clone() for name, parameter in one.trainable().items()}
    for number in range(3):
        chosen = rows[4 * number : 4 * number + 4]
        loss_one, load_one = step(one, watches[0], [collate(chosen, PAD)], config)
        loss_four, load_four = step(four, watches[1], [collate([row], PAD) for row in chosen], config)
        torch.testing.assert_close(loss_four, loss_one, rtol=1e-6, atol=0)
        torch.testing.assert_close(load_four, load_one, rtol=0, atol=0)  # padding is nobody's load
        for name, parameter in one.trainable().items():
            assert parameter.grad is not None
            gradient = four.trainable()[name].grad
            assert gradient is not None
            scale = parameter.grad.abs().max().item()
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5 * scale)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in one.trainable().items():
        moved = (parameter - start[name]).abs().max().item()
        assert moved > 0
        # to 1e-4 of the way that it moved, and the last bit of the weight itself
        eps = torch.finfo(torch.float32).eps
        torch.testing.assert_close(four.trainable()[name], parameter, rtol=eps, atol=1e-4 * moved)


def test_loss_is_a_mean_over_tokens(configure: small.Configure, tmp_path: Path) -> None:
    """Against the definition, token by token in float64: a mean of the rows' means would be another number."""
    config = configure(output=tmp_path)
    adapted = build(config, "cpu")
    rows = rows_of(config)[:4]
    row_losses = []
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        log_probability = adapted.model(input_ids=ids, use_cache=False).logits[0].double().log_softmax(-1)
        row_losses.append(
            [
                -log_probability[at - 1, label].item()
                for at, label in enumerate(row["labels"])
                if at and label != IGNORED
            ]
        )
    tokens = [loss for losses in row_losses for loss in losses]
    by_hand = sum(tokens) / len(tokens)
    mean_of_means = sum(sum(losses) / len(losses) for losses in row_losses) / len(row_losses)
    loss, _ = step(adapted, RouterWatch(adapted), [collate(rows[:3], PAD), collate(rows[3:], PAD)], config)
    assert loss.item() == pytest.approx(by_hand, rel=1e-6)
    assert abs(mean_of_means - by_hand) > 1e-4 * by_hand


def test_token_loss_is_the_sum_of_the_models_own(configure: small.Configure, tmp_path: Path) -> None:
    config = configure(output=tmp_path)
    adapted = build(config, "cpu")
    batch = collate(rows_of(config)[:3], PAD)
    own = adapted.model(**batch, use_cache=False).loss
    torch.testing.assert_close(token_loss(adapted.model, batch), own * count_loss_tokens(batch), rtol=1e-6, atol=0)
