"""Forward and backward of a micro-batch, with token loss and router losses."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from moetune.config.resolved import ResolvedTrain
from moetune.run.resolved import LEAST_LOSS_MEMORY
from moetune.training.step.batch import Batch
from moetune.training.step.lm_head import split
from moetune.training.step.loss import IGNORED, Chunks, summed_cross_entropy
from moetune.training.step.router_losses import RouterWatch, losses_of


@dataclass(frozen=True)
class MicroStep:
    """Results of a micro-step; all tensors are detached and on the device.

    Attributes:
        loss: summed token loss of the micro-batch, divided by the loss tokens of the whole step, a scalar.
        router_loss: weighted sum of the router losses, times the micro-batch's share of the step's loss tokens; None if
            both are off.
        load: layer index -> number of tokens that each expert received, float [E].
    """

    loss: Tensor
    router_loss: Tensor | None
    load: dict[int, Tensor]


def count_loss_tokens(batch: Batch) -> Tensor:
    """Return the number of tokens that are predicted: labels that are not `IGNORED`, without the first of each row.

    The result is a scalar on the device, which is not waited for.
    """
    return (batch["labels"][:, 1:] != IGNORED).sum()


def token_loss(
    model: PreTrainedModel, batch: Batch, divisor: Tensor | int = 1, memory: int | Chunks | None = LEAST_LOSS_MEMORY
) -> Tensor:
    """Return (Σ cross-entropy of all predicted tokens of a batch) / `divisor`, a float32 scalar.

    Args:
        memory: bytes that the logits of a chunk may take (None: all tokens in one chunk), or the chunks themselves.
    """
    inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", "is_token")}
    targets = pad(batch["labels"][:, 1:], (0, 1), value=IGNORED).flatten()
    with split(model, inputs) as (hidden, head):
        return summed_cross_entropy(head, hidden.flatten(0, 1), targets, divisor=divisor, memory=memory)


@torch.no_grad()
def held_out_loss(
    model: PreTrainedModel, batch: Batch, memory: int | Chunks | None = LEAST_LOSS_MEMORY
) -> tuple[Tensor, Tensor]:
    """Return (summed token loss, number of predicted tokens) of a batch, as scalars on the device, without gradients.

    `memory`: bytes that the logits of a chunk may take (None: all tokens in one chunk), or the chunks themselves.
    """
    return token_loss(model, batch, memory=memory), count_loss_tokens(batch)


def forward_pass(
    model: PreTrainedModel,
    batch: Batch,
    total_tokens: Tensor | int,
    watch: RouterWatch,
    config: ResolvedTrain,
    memory: int | Chunks | None = LEAST_LOSS_MEMORY,
) -> tuple[Tensor, MicroStep]:
    """Run the forward pass of one micro-batch; return the scalar to run the backward pass of, and the results.

    Args:
        total_tokens: predicted tokens of the whole step, summed over micro-batches and ranks. The loss is divided by
            it, so that 4 micro-batches of 1 row give the same step as 1 of 4 rows, whatever their lengths. Router
            losses are weighted by the micro-batch's share of these tokens.
        watch: records the routing, for the result's `load` and for router losses.
        config: has the coefficients of the router losses.
        memory: bytes that the logits of a chunk may take (None: all tokens in one chunk), or the chunks themselves.
    """
    shape_routing = bool(config.router_aux_loss or config.router_z_loss)
    mask = batch.get("is_token", batch.get("attention_mask"))
    with watch.recording(mask, logits=shape_routing) as routed:
        loss = token_loss(model, batch, total_tokens, memory)
    statistics = watch.statistics(routed) if shape_routing else None
    return with_router_losses(loss, statistics, batch, total_tokens, config, routed.load)


def with_router_losses(
    loss: Tensor,
    statistics: Mapping[int, Tensor] | None,
    batch: Batch,
    total_tokens: Tensor | int,
    config: ResolvedTrain,
    load: dict[int, Tensor],
) -> tuple[Tensor, MicroStep]:
    """Return the scalar to run the backward pass of, and the results of a micro-batch, whose token loss is `loss`.

    Args:
        statistics: of each layer what `RouterWatch.statistics` returns; None without router losses.
        load: layer index -> tokens that chose each expert, float [E].
    """
    if statistics is None:
        return loss, MicroStep(loss.detach(), None, load)
    balance, z = losses_of(statistics, per_layer=config.router_aux_scope == "layer")
    share = count_loss_tokens(batch) / total_tokens
    router_loss = share * (config.router_aux_loss * balance + config.router_z_loss * z)
    return loss + router_loss, MicroStep(loss.detach(), router_loss.detach(), load)
