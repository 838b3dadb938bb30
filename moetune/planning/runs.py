"""`Runs`: the runs of one model that a plan compares; a strategy and how much trains make a run."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moetune.config.schema import RunConfig
from moetune.memory.changes import changed
from moetune.memory.closed_form.lora_ranks import HIGHEST, LOWEST
from moetune.models.selection import ranges
from moetune.models.structure import ModelStructure
from moetune.planning.strategies import Goal, Strategy

RANKS = (LOWEST, 8, 16, 32, HIGHEST)
"""Ranks of LoRA that a plan tries."""


@dataclass(frozen=True)
class Runs:
    """The runs of one model that a plan compares. How much trains is called its amount (`Candidate.amount`).

    Attributes:
        start: configuration with the model, the GPU and the length of a sequence, to which a strategy's settings are
            added.
        structure: the model's layers and parameters.
    """

    start: RunConfig
    structure: ModelStructure

    @cached_property
    def layers(self) -> list[int]:
        """Numbers of the decoder layers that have experts."""
        return [layer.index for layer in self.structure.moe_layers]

    @cached_property
    def experts(self) -> int:
        """The smallest number of experts of any MoE layer; 0 for a dense model."""
        return min((layer.shape.num_experts for layer in self.structure.moe_layers), default=0)

    def least(self, strategy: Strategy) -> int:
        """Return the amount of a strategy's `smallest` run."""
        return {"experts": strategy.step, "lora": RANKS[0], "router": 0}[strategy.goal]

    def most(self, goal: Goal) -> int:
        """Return the largest amount that a goal can have: all experts, or the highest rank."""
        return {"experts": len(self.layers) * self.experts, "lora": RANKS[-1], "router": 0}[goal]

    def smallest(self, strategy: Strategy) -> RunConfig:
        """Return the smallest run of a strategy: one expert of one layer on each rank that stores experts of its own,
        LoRA of the lowest rank, or all routers."""
        match strategy.goal:
            case "experts":
                return self.of_experts(strategy, 1, strategy.step)
            case "lora":
                return self.of_rank(strategy, RANKS[0])
        return self._with(strategy, {"adapt.router": "all"})

    def of_experts(self, strategy: Strategy, layers: int, each: int) -> RunConfig:
        """Return the run that trains the first `each` experts of each of the first `layers` MoE layers."""
        chosen = {"layers": ranges(self.layers[:layers]), "ids": ranges(range(each))}
        return self._with(strategy, {f"adapt.experts.{key}": value for key, value in chosen.items()})

    def of_rank(self, strategy: Strategy, rank: int) -> RunConfig:
        """Return the run with LoRA of the given rank on attention and experts (on the MLPs of a dense model)."""
        targets = ["attention", "experts" if self.layers else "dense_mlp"]
        lora = {"rank": rank, "alpha": 2 * rank, "targets": targets}
        return self._with(strategy, {f"adapt.lora.{key}": value for key, value in lora.items()})

    def _with(self, strategy: Strategy, settings: dict[str, Any]) -> RunConfig:
        return changed(self.start, {**strategy.settings, **settings})
