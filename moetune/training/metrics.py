"""What a run sums up between two lines of `metrics.jsonl`, and the line that becomes of it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moetune.parallel.ranks import Ranks
from moetune.training.pace import Pace
from moetune.training.routing import load_by_layer, load_summary, on_host
from moetune.training.run_warnings import RunWarnings
from moetune.training.step.micro_step import MicroStep
from moetune.training.step.stepper import Reduced


@dataclass
class Sums:
    """What micro-steps have summed up, of this rank.

    Attributes:
        load: by layer, the tokens [E] that each expert received.
        router_loss: weighted; None where router losses are off.
        positions: tokens, padding included.
        tokens: tokens, padding left out.
    """

    load: dict[int, Tensor] = field(default_factory=dict)
    router_loss: Tensor | None = None
    positions: int = 0
    tokens: int = 0

    def add(self, done: MicroStep | Sums) -> None:
        """Adds a micro-step, or what others have summed up; what is added stays as it is."""
        add_load(self.load, done.load)
        if done.router_loss is not None:
            self.router_loss = done.router_loss if self.router_loss is None else self.router_loss + done.router_loss
        if isinstance(done, Sums):
            self.positions += done.positions
            self.tokens += done.tokens


@dataclass
class Interval:
    """The steps since the last line."""

    sums: Sums = field(default_factory=Sums)
    losses: list[Tensor] = field(default_factory=list)
    updates: int = 0
    since: float = field(default_factory=time.perf_counter)

    def add(self, sums: Sums, reduced: Reduced) -> None:
        """Adds a step; one that was skipped has no loss."""
        self.sums.add(sums)
        self.updates += 1
        if reduced.scale is not None:
            self.losses.append(reduced.loss)

    def pause(self) -> None:
        """Evaluations do not count for the speed: the clock begins anew, and tokens with it."""
        self.since, self.sums.positions = time.perf_counter(), 0

    def line(
        self,
        step: int,
        left: int,
        lr: float,
        norm: Tensor,
        moves: bool,
        total_load: dict[int, Tensor],
        ranks: Ranks,
        pace: Pace,
        notices: RunWarnings,
    ) -> dict[str, Any]:
        """The line of metrics, of all ranks.

        Args:
            left: steps that are.
            lr, norm: of the last step.
            moves: whether learning rates were such that weights should have changed.
            total_load: since the run began; this interval's is added.
        """
        loss = torch.stack(self.losses).mean().item() if self.losses else None
        seconds = time.perf_counter() - self.since
        load = {layer: ranks.total_over_data(tokens) for layer, tokens in self.sums.load.items()}
        add_load(total_load, load)
        load = on_host(load)
        router_loss = self.sums.router_loss
        if router_loss is not None:
            router_loss = ranks.total_over_data(router_loss) / self.updates
        updated = bool(self.losses) and moves and norm.item() > 0
        return {
            "step": step,
            "loss": loss,
            "router_loss": None if router_loss is None else router_loss.item(),
            "lr": lr,
            "grad_norm": norm.item() if math.isfinite(norm.item()) else None,  # JSON has no NaN
            "skipped_steps": self.updates - len(self.losses),
            "tokens_per_second": round(self.sums.positions * ranks.data_size / seconds, 1),
            **pace.metrics(self.updates, seconds, left),
            "peak_allocated": torch.cuda.max_memory_allocated(norm.device) if norm.is_cuda else None,
            "expert_load": load_summary(load),
            "routing": load_by_layer(load),
            **notices.about_step(loss, updated, load, on_host(total_load)),
        }


def add_load(sums: dict[int, Tensor], more: Mapping[int, Tensor]) -> None:
    """Adds by layer; what is added stays as it is."""
    for layer, tensor in more.items():
        sums[layer] = sums[layer] + tensor if layer in sums else tensor.clone()
