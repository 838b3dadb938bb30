"""Updates by DeepSpeed, which shares gradients, states and weights over the ranks (parallel/deepspeed.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moetune.parallel.deepspeed import Engine
from moetune.parallel.ranks import Ranks
from moetune.training.optim.updater import MakeOptimizer, Updater


class ZeroUpdater(Updater):
    """All that trains, updated by DeepSpeed's engine, which clips too.

    Args:
        settings: DeepSpeed's configuration (`deepspeed_json`).
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: list[nn.Parameter],
        make: MakeOptimizer,
        settings: dict[str, Any],
        ranks: Ranks,
    ) -> None:
        self.key, self.parameters, self.fused, self.masters = "deepspeed", parameters, False, "fp32"
        self.shards, self.copies, self.ranks = {parameter: parameter for parameter in parameters}, {}, ranks
        self.optimizer = make(parameters)
        self.engine = Engine(model, self.optimizer, settings)

    def step(self, scale: float = 1.0) -> None:
        """One update. `scale` is not used: the engine finds its own, from the same norm."""
        self.engine.step()

    def masters_kept(self) -> Iterator[Tensor]:
        return iter(self.engine.masters)

    def saved(self) -> Iterator[tuple[nn.Parameter, Tensor, dict[str, Any]]]:
        """Whole tensors, on the host; of every so many-th parameter, so that no rank holds, or writes, all of them."""
        self.engine.link_states()
        for number, parameter in enumerate(self.parameters):
            with self.engine.gathered(parameter):
                states = self.engine.states(parameter)
                if number % self.ranks.parallel.ranks == self.ranks.rank:
                    on_host = {key: value.to("cpu", copy=True) for key, value in states.items()}
                    yield parameter, parameter.detach().to("cpu", copy=True), on_host

    @torch.no_grad()
    def restore(self, parameter: nn.Parameter, states: dict[str, Any]) -> None:
        """Takes over the states that a checkpoint has of a parameter."""
        self.engine.put(parameter, states)
