"""The training step on fake tensors, every storage of it recorded.

The model comes from the same `build`, the step is the trainer's own, the optimizer too. What is injected is the one
value that shapes depend on: how many tokens each expert receives (`routing`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moetune.adapt.build import Adapted
from moetune.adapt.fake import tensors_of
from moetune.config import RunConfig
from moetune.memory.tracker import Block, Mark, Tracker, tagging_gradients
from moetune.step.optimizers import make_optimizer
from moetune.step.router_losses import RouterWatch
from moetune.step.step import Batch, count_loss_tokens, micro_step, update


@dataclass(frozen=True)
class Trace:
    """Every storage of two steps, in order of birth, and what happened when."""

    blocks: list[Block]
    marks: list[Mark]


def make_batch(config: RunConfig, vocabulary: int) -> Batch:
    """A micro-batch as the run's collator gives it: `[micro_batch, sequence_length]`, two documents a row if packed,
    one row shorter than the others if padded, so that attention needs a mask as it does on real data."""
    shape = (config.train.micro_batch, config.train.sequence_length)
    ids = torch.randint(vocabulary, shape)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if config.data is None or config.data.packing:
        half = shape[1] // 2
        positions = torch.cat([torch.arange(half), torch.arange(shape[1] - half)])
        return {**batch, "position_ids": positions.repeat(shape[0], 1), "is_token": torch.ones_like(ids)}
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    batch["labels"][0, -1] = -100
    return {**batch, "attention_mask": mask}


def run_steps(adapted: Adapted, config: RunConfig, tracker: Tracker, batches: Callable[[], Batch], steps: int) -> None:
    """Runs the trainer's steps under a tracker."""
    model = adapted.model
    trained = list(adapted.trainable().values())
    optimizer = make_optimizer(trained, config.optimizer)
    watch = RouterWatch(adapted)
    tracker.tag
    for tensor in tensors_of(model):
        tracker.add(tensor, "trainable_weights" if tensor.requires_grad else "frozen_weights")
    with tracker, tracker.naming(), tagging_gradients(tracker, trained):
        for step in range(steps):
            tracker.step = step
            held = [batches() for _ in range(config.train.accumulate)]
            for batch in held:
                for tensor in batch.values():
                    tracker.add(tensor, "saved_activations", "batch")
            tokens = torch.stack([count_loss_tokens(batch) for batch in held]).sum()
            for number, batch in enumerate(held):
                tracker.micro_step = number
                tracker.enter("forward")
                began = tracker.clock

                def backward(loss: Tensor, began=began) -> None:
                    for block in tracker.alive():
                        if block.born >= began and block.part == "transient_peak":
                            block.part = "saved_activations"
                    tracker.enter("backward")
                    loss.backward()

                micro_step(model, batch, tokens, watch, config.train, backward)
            tracker.enter("optimizer")
            update(trained, optimizer, config.train.max_grad_norm)
            tracker.tag(
                (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)),
                "optimizer_states",
            )
    watch.remove()
