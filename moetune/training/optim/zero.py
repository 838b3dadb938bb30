"""Updates by DeepSpeed's ZeRO, which shards gradients, states and weights over the ranks (parallel/deepspeed.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moetune.parallel.deepspeed import Engine
from moetune.parallel.ranks import Ranks
from moetune.training.optim.updater import MakeOptimizer, Updater


class ZeroUpdater(Updater):
    """Updates everything that trains by DeepSpeed's engine, which clips too.

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
        self.parameters, self.fused, self.masters = parameters, False, "fp32"
        self.shards, self.copies, self.ranks = {parameter: parameter for parameter in parameters}, {}, ranks
        self.optimizer = make(parameters)
        self.engine = Engine(model, self.optimizer, settings)

    def step(self, scale: float = 1.0) -> None:
        """Update. `scale` is ignored: the engine computes its own from the same norm."""
        self.engine.step()

    def masters_kept(self) -> Iterator[Tensor]:
        return iter(self.engine.masters)

    def saved(self) -> Iterator[tuple[nn.Parameter, Tensor, dict[str, Any]]]:
        """Yield whole tensors, on the host. Each rank yields every n-th parameter, so that none holds or writes all."""
        self.engine.link_states()
        for number, parameter in enumerate(self.parameters):
            with self.engine.gathered(parameter):
                states = self.engine.states(parameter)
                if number % self.ranks.parallel.ranks == self.ranks.rank:
                    on_host = {key: value.to("cpu", copy=True) for key, value in states.items()}
                    yield parameter, parameter.detach().to("cpu", copy=True), on_host

    @torch.no_grad()
    def restore(self, states: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Load the states of some parameters, which are gathered."""
        for parameter, values in states.items():
            self.engine.put(parameter, values)
