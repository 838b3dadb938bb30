"""The one training step. The trainer runs it; whatever predicts or verifies its memory runs it too.

A step is `accumulate` micro-steps (forward and backward), one clip, one optimizer update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from moetune.config import TrainConfig
from moetune.step.loss import IGNORED, summed_cross_entropy
from moetune.step.router_losses import RouterWatch

Batch = Mapping[str, Tensor]
"""`input_ids` and `labels` [B, S], and either `attention_mask` or `position_ids` and `is_token`, [B, S] too."""


@dataclass(frozen=True)
class MicroStep:
    """What one micro-step gives: its share of the step's token loss and of the weighted router losses (None where
    those are off), and the tokens each expert of each layer received."""

    loss: Tensor
    router_loss: Tensor | None
    load: dict[int, Tensor]


def count_loss_tokens(batch: Batch) -> Tensor:
    """Tokens of a batch that are predicted: each label but the first of a row, padding and prompts left out."""
    return (batch["labels"][:, 1:] != IGNORED).sum()


def token_loss(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The summed cross-entropy of every predicted token, in float32."""
    inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", "is_token")}
    logits = model(**inputs, use_cache=False).logits
    targets = pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]  # a view of the labels, not a copy of the logits
    return summed_cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """(the summed loss, the predicted tokens) of a batch that nothing is learned from."""
    return token_loss(model, batch), count_loss_tokens(batch)


def micro_step(
    model: PreTrainedModel,
    batch: Batch,
    total_tokens: Tensor | int,
    watch: RouterWatch,
    config: TrainConfig,
    backward: Callable[[Tensor], None] = torch.Tensor.backward,
) -> MicroStep:
    """Forward and backward of one micro-batch.

    Args:
        total_tokens: predicted tokens of the whole step, all micro-batches and ranks together. Dividing by it makes
            4 × 1 the same step as 1 × 4, whatever the lengths; router losses count by the same share.
        backward: what runs the backward pass (the engine's, under distribution).
    """
    shape_routing = bool(config.router_aux_loss or config.router_z_loss)
    with watch.recording(logits=shape_routing) as routed:
        loss = token_loss(model, batch) / total_tokens
    mask = batch.get("attention_mask", batch.get("is_token"))
    router_loss = None
    if shape_routing:
        balance, z = watch.losses(routed, mask)
        share = count_loss_tokens(batch) / total_tokens
        router_loss = share * (config.router_aux_loss * balance + config.router_z_loss * z)
    load = watch.load(routed, mask)
    del routed
    backward(loss if router_loss is None else loss + router_loss)
    return MicroStep(loss.detach(), None if router_loss is None else router_loss.detach(), load)


def update(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, max_grad_norm: float) -> Tensor:
    """Clips the gradients to a total norm (0: not at all), updates, and frees them, as `Trainer` does after the last
    micro-step. Returns the norm before clipping."""
    norm = clip_grad_norm_(parameters, max_grad_norm or torch.inf)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
