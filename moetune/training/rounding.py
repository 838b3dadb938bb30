"""Whether updates were rounded away: 16-bit weights without master weights, at too low a learning rate."""

from __future__ import annotations

import torch
from rich.console import Console
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from moetune.adapt.build import Adapted
from moetune.parallel.ranks import local_tensor

SAMPLE = 4096
"""Weights of each parameter that are looked at, evenly over it."""
TOO_FEW = 0.5
"""Where a smaller share has moved in a run, most of what was learned is lost."""


class RoundingWatch(TrainerCallback):
    """Compares a sample of what trains with what it was, and says so where most of it has not moved."""

    def __init__(self, adapted: Adapted, console: Console) -> None:
        optimizers = adapted.run.optimizers
        self.console = console
        self.watched = [
            local_tensor(parameter)
            for name, parameter in adapted.trainable().items()
            if parameter.itemsize == 2
            and (optimizer := optimizers[adapted.part_of(name)]).master_weights == "none"
            and not optimizer.offload
        ]
        self._before: list[Tensor] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self._before = [_sample(tensor) for tensor in self.watched]

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        share = self.share_moved()
        if share is not None and share < TOO_FEW:
            self.console.print(
                f"warning: {share:.1%} of the weights that train in 16 bits have moved; the others' updates were "
                "smaller than half a step of their precision and were rounded away, or no token reached them. Set "
                "optimizer.master_weights: stochastic (no memory) or fp32 (4 bytes a parameter), or raise optimizer.lr",
                highlight=False,
                soft_wrap=True,
            )

    def share_moved(self) -> float | None:
        """Of the sampled weights; None if none trains in 16 bits without help."""
        count = sum(map(len, self._before))
        if not count:
            return None
        moved = sum(
            int((now != then).sum()) for now, then in zip(map(_sample, self.watched), self._before, strict=True)
        )
        return moved / count


@torch.no_grad()
def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(len(flat) // SAMPLE, 1)].cpu().clone()
