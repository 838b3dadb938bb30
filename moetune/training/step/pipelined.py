"""A step over the stages of a pipeline; the last rank runs the loss.

Every rank of a pipeline has all micro-batches of the step, in equal shapes. Stages send each other hidden states
[B, S, H]; masks, positions and rotary tables are computed on each rank from the batch.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn.functional import pad

from moetune.adapt.build import Adapted
from moetune.models.stack import StageLayers
from moetune.parallel.pipeline import run_stages
from moetune.training.step.batch import Batch
from moetune.training.step.loss import Chunks
from moetune.training.step.micro_step import MicroStep, token_loss, with_router_losses
from moetune.training.step.router_losses import Routed, RouterWatch


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
        self._sizes = {layer.index: 2 * layer.shape.num_experts + 1 for layer in run.structure.moe_layers}
        self._trains_before = run.trains_before_stages
        self._gets_gradient = (*self._trains_before, False)[adapted.ranks.coordinates.pp + 1 :: run.config.parallel.pp]
        self._width = run.model.plain.get_parameter(run.embedding).shape[-1]

    def run(
        self,
        batches: Sequence[Batch],
        total_tokens: Tensor | int,
        memory: int | Chunks | None,
        around: Callable[[], AbstractContextManager[None]] | None,
        scale: float = 1.0,
    ) -> list[MicroStep]:
        """Run forward and backward of all micro-batches; return what this rank knows of each, in order.

        The loss is 0 on ranks without the last stage, and the expert load is that of this rank's layers.

        Args:
            batches: the micro-batches of the step, of equal shapes.
            total_tokens: what losses are divided by.
            memory: bytes that the logits of a chunk may take.
            around: makes the context manager in which each backward pass runs; None for forward passes only.
            scale: the loss scale, by which a loss is multiplied before its backward pass.
        """
        model, device, train = self._adapted.model, self._adapted.model.device, self._adapted.run.config.train
        shape_routing = bool(train.router_aux_loss or train.router_z_loss) and around is not None
        nothing = torch.zeros((), device=device)
        done = [MicroStep(nothing, nothing.clone() if shape_routing else None, {}) for _ in batches]

        def forward(stage: int, number: int, received: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
            batch, layers = batches[number], self._stages[stage]
            mask = batch.get("is_token", batch.get("attention_mask"))
            hidden, statistics = (*received, None, None)[:2]
            with layers.entered(hidden), self._watch.recording(mask, logits=shape_routing) as routed:
                if layers.is_last:
                    leaves = token_loss(model, batch, total_tokens, memory)
                else:
                    inputs = {name: value for name, value in batch.items() if name not in ("labels", "is_token")}
                    leaves = layers.hidden_states(inputs)
                    if not self._gets_gradient[stage]:  # checkpointing makes it require one
                        leaves = leaves.detach()
            done[number].load.update(routed.load)
            if shape_routing:
                statistics = self._statistics(routed, statistics)
            if not layers.is_last:
                return (leaves,) if statistics is None else (leaves, statistics)
            pairs = None if statistics is None else zip(self._sizes.items(), statistics, strict=True)
            of_layers = None if pairs is None else {layer: row[:size] for (layer, size), row in pairs}
            loss, done[number] = with_router_losses(leaves, of_layers, batch, total_tokens, train, done[number].load)
            return loss * scale

        rows = batches[0]["input_ids"]
        sent = [torch.empty(*rows.shape, self._width, dtype=self._adapted.run.dtype, device="meta")]
        if shape_routing:
            sent.append(torch.empty(len(self._sizes), max(self._sizes.values()), device="meta"))
        run_stages(self._adapted.ranks, forward, len(batches), tuple(sent), self._trains_before, device, around)
        return done

    def _statistics(self, routed: Routed, before: Tensor | None) -> Tensor:
        """Return what router losses are made of, a row for each layer with experts of the whole model: the rows of
        this stage's layers, added to those from `before`; zeros for later ones."""
        here, width = self._watch.statistics(routed), max(self._sizes.values())
        nothing = torch.zeros(width, device=self._adapted.model.device)
        rows = torch.stack(
            [pad(here[n], (0, width - size)) if n in here else nothing for n, size in self._sizes.items()]
        )
        return rows if before is None else before + rows
