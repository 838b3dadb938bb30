"""Updates by DeepSpeed's ZeRO (parallel/deepspeed.py), which shards gradients, states and weights over ranks."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moetune.parallel.deepspeed import Engine
from moetune.parallel.ranks import Ranks
from moetune.training.optim.updater import MakeOptimizer, Updater


class ZeroUpdater(Updater):
    """Updates all parameters that train by DeepSpeed's engine, which also clips the gradients.

    Args:
        model: the adapted model, on its device.
        make: makes the optimizer over `parameters`.
        settings: DeepSpeed's configuration, from `deepspeed_json`.
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
        """Clip the gradients and update the weights. `scale` is ignored: DeepSpeed computes its own from the same
        gradient norm."""
        self.engine.step()

    def masters_kept(self) -> Iterator[Tensor]:
        return iter(self.engine.masters)

    def saved(self) -> Iterator[tuple[nn.Parameter, Tensor, dict[str, Any]]]:
        """Yield parameters, their weights and their states by name, as whole tensors that are copied to the host.

        Each of n ranks yields every n-th parameter, so that no rank holds or writes all. Every rank must call this.
        """
        self.engine.link_states()
        for number, parameter in enumerate(self.parameters):
            with self.engine.gathered(parameter):
                states = self.engine.states(parameter)
                if number % self.ranks.parallel.ranks == self.ranks.rank:
                    on_host = {key: value.to("cpu", copy=True) for key, value in states.items()}
                    yield parameter, parameter.detach().to("cpu", copy=True), on_host

    @torch.no_grad()
    def restore(self, states: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Load `states`, parameter -> name of a state -> whole tensor, into DeepSpeed's optimizer.

        Call it while the parameters are gathered (`Engine.gathered`).
        """
        for parameter, values in states.items():
            self.engine.put(parameter, values)
