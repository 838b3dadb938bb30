"""A step's micro-batches over the stages of a pipeline: each rank runs its own layers, and the last one the loss.

Every rank of a pipeline has all micro-batches of the step, in equal shapes. Stages send each other hidden states
[B, S, H]; masks, positions and rotary tables are computed on each rank from the batch.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from moetune.adapt.build import Adapted
from moetune.models.stack import StageLayers
from moetune.parallel.pipeline import run_stages
from moetune.training.step.batch import Batch
from moetune.training.step.loss import Chunks
from moetune.training.step.micro_step import MicroStep, token_loss
from moetune.training.step.router_losses import RouterWatch, add_load


def stages_on(adapted: Adapted) -> list[StageLayers]:
    """Return the stages of the pipeline that are on this rank; none without `parallel.pp`."""
    pp, at = adapted.ranks.parallel.pp, adapted.ranks.coordinates.pp
    return [StageLayers(adapted.model, layers) for layers in adapted.run.stages[at::pp]] if pp > 1 else []


class Pipeline:
    """The stages of a model on this rank.

    Args:
        adapted: the part of the model that this rank holds.
        watch: records the routing of its layers.
    """

    def __init__(self, adapted: Adapted, watch: RouterWatch) -> None:
        run = adapted.run
        self._adapted, self._watch, self._stages = adapted, watch, stages_on(adapted)
        self._trains_before = run.trains_before_stages
        self._width = run.model.plain.get_input_embeddings().weight.shape[-1]

    def run(
        self,
        batches: Sequence[Batch],
        total_tokens: Tensor | int,
        memory: int | Chunks | None,
        around: Callable[[], AbstractContextManager[None]] | None,
        scale: Callable[[Tensor], Tensor] = lambda loss: loss,
    ) -> list[MicroStep]:
        """Run forward and backward of all micro-batches; return what this rank knows of each, in order.

        The loss is 0 on ranks without the last stage, and the expert load is that of this rank's layers.

        Args:
            batches: the micro-batches of the step, of equal shapes.
            total_tokens: what losses are divided by.
            memory: bytes that the logits of a chunk may take.
            around: makes the context manager in which each backward pass runs; None for forward passes only.
            scale: multiplies a loss before its backward pass.
        """
        model, device = self._adapted.model, self._adapted.model.device
        loads: list[dict[int, Tensor]] = [{} for _ in batches]
        losses = [torch.zeros((), device=device) for _ in batches]

        def forward(stage: int, number: int, received: tuple[Tensor, ...]) -> Tensor:
            batch, layers = batches[number], self._stages[stage]
            mask = batch.get("is_token", batch.get("attention_mask"))
            with (
                layers.entered(received[0] if received else None),
                self._watch.recording(mask, logits=False) as routed,
            ):
                if layers.is_last:
                    result = token_loss(model, batch, total_tokens, memory)
                    losses[number] = result.detach()
                    result = scale(result)
                else:
                    inputs = {name: value for name, value in batch.items() if name not in ("labels", "is_token")}
                    result = layers.hidden_states(inputs)
            add_load(loads[number], routed.load)
            return result

        rows = batches[0]["input_ids"]
        sent = torch.empty(*rows.shape, self._width, dtype=self._adapted.run.dtype, device="meta")
        run_stages(self._adapted.ranks, forward, len(batches), (sent,), self._trains_before, device, around)
        return [MicroStep(loss, None, load) for loss, load in zip(losses, loads, strict=True)]
