"""A micro-step: forward and backward of a micro-batch. A whole step is in stepper.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from moetune.config.schema import ResolvedTrain, TrainConfig
from moetune.training.step.batch import Batch
from moetune.training.step.lm_head import split
from moetune.training.step.loss import IGNORED, Chunks, summed_cross_entropy
from moetune.training.step.router_losses import RouterWatch

LOSS_MEMORY = TrainConfig().loss_bytes
"""Default of `train.loss_memory`, in bytes."""


@dataclass(frozen=True)
class MicroStep:
    """Results of a micro-step.

    Attributes:
        loss: its share of the step's token loss.
        router_loss: its share of the weighted router losses; None where those are off.
        load: expert load [E] by layer.
    """

    loss: Tensor
    router_loss: Tensor | None
    load: dict[int, Tensor]


def count_loss_tokens(batch: Batch) -> Tensor:
    """Return the number of predicted tokens: of the labels but the first of each row, those that are not `IGNORED`."""
    return (batch["labels"][:, 1:] != IGNORED).sum()


def token_loss(
    model: PreTrainedModel, batch: Batch, divisor: Tensor | int = 1, memory: int | Chunks | None = LOSS_MEMORY
) -> Tensor:
    """Return the summed cross-entropy of all predicted tokens over `divisor`, in float32, with logits in chunks of
    `memory` bytes (None: all at once)."""
    inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", "is_token")}
    targets = pad(batch["labels"][:, 1:], (0, 1), value=IGNORED).flatten()
    with split(model, inputs) as (hidden, head):
        return summed_cross_entropy(head, hidden.flatten(0, 1), targets, divisor=divisor, memory=memory)


@torch.no_grad()
def held_out_loss(
    model: PreTrainedModel, batch: Batch, memory: int | Chunks | None = LOSS_MEMORY
) -> tuple[Tensor, Tensor]:
    """Return (summed loss, predicted tokens) of a batch of held-out data."""
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
    """Run forward and backward of a micro-batch.

    Args:
        total_tokens: predicted tokens of the whole step, over micro-batches and ranks. Divided by it, 4 × 1 is the same
            step as 1 × 4, whatever the lengths. Router losses have the same share.
        backward: runs the backward pass of a loss.
        memory: as in `token_loss`.
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
