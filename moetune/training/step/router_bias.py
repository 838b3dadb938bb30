"""Correction biases of routers, updated without a loss, by the expert load of each step.

    b_e += rate · sign(mean load - load_e)

b_e is added to an expert's score before the choice, and to no routing weight (Wang et al., "Auxiliary-Loss-Free Load
Balancing", arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2, with a rate of 0.001).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moetune.adapt.build import Adapted


class RouterBiases:
    """The biases of layers whose router trains, under `train.router_bias_rate`; none in other runs."""

    def __init__(self, adapted: Adapted) -> None:
        biases, self._ranks = adapted.router_biases(), adapted.ranks
        self._biases = {layer: biases[name] for layer, name in adapted.run.router_biases.items() if name in biases}
        self._rate = adapted.run.config.train.router_bias_rate
        self._load: dict[int, Tensor] = {}

    def count(self, load: Mapping[int, Tensor]) -> None:
        """Add the expert load [E] of a micro-step, by layer."""
        for layer in self._biases:
            if layer in self._load:
                self._load[layer] += load[layer]
            else:
                self._load[layer] = load[layer].clone()

    @torch.no_grad()
    def update(self) -> None:
        """Update by the load of a step's micro-steps, over all ranks."""
        if not self._load:
            return
        totals = self._ranks.total_over_data(torch.cat(list(self._load.values())))
        sizes = [len(load) for load in self._load.values()]
        for layer, load_E in zip(self._load, totals.split(sizes), strict=True):
            bias = self._biases[layer]
            bias += self._rate * torch.sign(load_E.mean() - load_E).view_as(bias)
        self.forget()

    def forget(self) -> None:
        """Discard the load of a step that is not taken."""
        self._load = {}
