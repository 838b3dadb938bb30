"""One micro-step: forward and backward of a micro-batch. A whole step is in stepper.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from moetune.config.resolved import ResolvedTrain
from moetune.config.schema import TrainConfig
from moetune.training.step.batch import Batch
from moetune.training.step.lm_head import split
from moetune.training.step.loss import IGNORED, Chunks, summed_cross_entropy
from moetune.training.step.router_losses import RouterWatch

LOSS_MEMORY = TrainConfig().loss_bytes
"""`train.loss_memory` where a run file leaves it out."""


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


def token_loss(
    model: PreTrainedModel, batch: Batch, divisor: Tensor | int = 1, memory: int | Chunks | None = LOSS_MEMORY
) -> Tensor:
    """The summed cross-entropy of every predicted token over `divisor`, in float32; logits by chunks of `memory` bytes
    (None: all at once)."""
    inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", "is_token")}
    targets = pad(batch["labels"][:, 1:], (0, 1), value=IGNORED).flatten()
    with split(model, inputs) as (hidden, tail):
        return summed_cross_entropy(tail, hidden.flatten(0, 1), targets, divisor=divisor, memory=memory)


@torch.no_grad()
def held_out_loss(
    model: PreTrainedModel, batch: Batch, memory: int | Chunks | None = LOSS_MEMORY
) -> tuple[Tensor, Tensor]:
    """(the summed loss, the predicted tokens) of a batch that nothing is learned from."""
    return token_loss(model, batch, memory=memory), count_loss_tokens(batch)


def micro_step(
    model: PreTrainedModel,
    batch: Batch,
    total_tokens: Tensor | int,
    watch: RouterWatch,
    config: ResolvedTrain,
    backward: Callable[[Tensor], None] = torch.Tensor.backward,
    memory: int | Chunks | None = LOSS_MEMORY,
) -> MicroStep:
    """Forward and backward of one micro-batch.

    Args:
        total_tokens: predicted tokens of the whole step, all micro-batches and ranks together. Dividing by it makes
            4 × 1 the same step as 1 × 4, whatever the lengths; router losses count by the same share.
        backward: what runs the backward pass (the engine's, under distribution).
        memory: of the loss, as in `token_loss`.
    """
    shape_routing = bool(config.router_aux_loss or config.router_z_loss)
    mask = batch.get("is_token", batch.get("attention_mask"))
    with watch.recording(mask, logits=shape_routing) as routed:
        loss = token_loss(model, batch, total_tokens, memory)
    router_loss = None
    if shape_routing:
        balance, z = watch.losses(routed, per_layer=config.router_aux_scope == "layer")
        share = count_loss_tokens(batch) / total_tokens
        router_loss = share * (config.router_aux_loss * balance + config.router_z_loss * z)
    load = routed.load
    del routed
    backward(loss if router_loss is None else loss + router_loss)
    return MicroStep(loss.detach(), None if router_loss is None else router_loss.detach(), load)
