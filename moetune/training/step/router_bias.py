"""Update rule for routers' correction biases, by the expert load of each step.

    b_e += rate · sign(mean load - load_e)

b_e is added to the score of expert e when the top-k experts are chosen, and not to the routing weights (Wang et al.,
"Auxiliary-Loss-Free Load Balancing", arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2, with
a rate of 0.001).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from moetune.adapt.build import Adapted
from moetune.training.step.router_losses import add_load


class RouterBiases:
    """Updates the routers' correction biases after each step, so that experts receive equally many tokens.

    Call `count` after each micro-step, and once a step `update`, or `forget` if the step is skipped. Only layers whose
    router trains are updated; without `train.router_bias_rate` all methods do nothing.
    """

    def __init__(self, adapted: Adapted) -> None:
        biases, self._ranks = adapted.router_biases(), adapted.ranks
        self._biases = {layer: biases[name] for layer, name in adapted.run.router_biases.items() if name in biases}
        self._rate = adapted.run.config.train.router_bias_rate
        self._load: dict[int, Tensor] = {}

    def count(self, load: Mapping[int, Tensor]) -> None:
        """Add the expert load of a micro-step on this rank: layer index -> tokens that each expert received [E]."""
        add_load(self._load, {layer: load[layer] for layer in self._biases})

    @torch.no_grad()
    def update(self) -> None:
        """Update the biases in place from the load counted on all ranks since the last update, and reset the load.

        Every rank must call this.
        """
        for layer, load_E in self._load.items():
            bias, load_E = self._biases[layer], self._ranks.total_over_data(load_E)
            bias += self._rate * torch.sign(load_E.mean() - load_E).view_as(bias)
        self.forget()

    def forget(self) -> None:
        """Discard the load counted since the last update, for a step that is skipped."""
        self._load = {}
