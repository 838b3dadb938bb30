"""Sums between two lines of `metrics.jsonl`, and the line that is written of them. Expert load: tokens [E] by layer."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moetune.parallel.ranks import Ranks
from moetune.training.run_warnings import RunWarnings, entropy
from moetune.training.step.micro_step import MicroStep
from moetune.training.step.stepper import Reduced


@dataclass(frozen=True)
class Pace:
    """What the speed of a run is compared with.

    Attributes:
        flops: operations of a step's products and attention on one rank; None where they were not counted.
        limit: operations a second that the card can do; None if that is not known.
    """

    flops: int | None = None
    limit: int | None = None

    def metrics(self, updates: int, seconds: float, left: int) -> dict[str, float | None]:
        """Return the metrics of `updates` that took so many seconds, with `left` to come."""
        share = None
        if self.flops is not None and self.limit is not None:
            share = round(self.flops * updates / seconds / self.limit, 4)
        left_for = round(left * seconds / updates, 1) if updates else None
        return {"flops": self.flops, "share_of_limit": share, "seconds_left": left_for}


@dataclass
class Sums:
    """Sums over micro-steps, of this rank.

    Attributes:
        load: expert load.
        router_loss: weighted; None where router losses are off.
        positions: tokens, padding included.
        tokens: tokens, padding left out.
    """

    load: dict[int, Tensor] = field(default_factory=dict)
    router_loss: Tensor | None = None
    positions: int = 0
    tokens: int = 0

    def add(self, done: MicroStep | Sums) -> None:
        """Add a micro-step, or other sums, which stay as they are."""
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
        """Add a step; one that was skipped has no loss."""
        self.sums.add(sums)
        self.updates += 1
        if reduced.scale is not None:
            self.losses.append(reduced.loss)

    def restart_clock(self) -> None:
        """Measure speed from here on, after an evaluation."""
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
        warnings: RunWarnings,
    ) -> dict[str, Any]:
        """Return the line of metrics, over all ranks.

        Args:
            left: steps to come.
            lr, norm: of the last step.
            moves: learning rates were such that weights should have changed.
            total_load: expert load since the run began; this interval's is added to it.
        """
        loss = torch.stack(self.losses).mean().item() if self.losses else None
        seconds = time.perf_counter() - self.since
        load = {layer: ranks.total_over_data(tokens) for layer, tokens in self.sums.load.items()}
        add_load(total_load, load)
        load = _on_host(load)
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
            **warnings.about_step(loss, updated, load, _on_host(total_load)),
        }


def add_load(sums: dict[int, Tensor], more: Mapping[int, Tensor]) -> None:
    """Add expert load to sums; `more` stays as it is."""
    for layer, tensor in more.items():
        sums[layer] = sums[layer] + tensor if layer in sums else tensor.clone()


def load_summary(load: Mapping[int, Tensor]) -> dict[str, float]:
    """Return expert load in three numbers: `max_over_mean` of the most uneven layer (1 is balanced, E / K the worst),
    that `layer`, and how many experts of all layers were `unused`."""
    if not load:
        return {}
    imbalance = {layer: (tokens.max() / tokens.mean()).item() for layer, tokens in load.items()}
    worst = max(imbalance, key=imbalance.__getitem__)
    unused = sum(int((tokens == 0).sum()) for tokens in load.values())
    return {"max_over_mean": round(imbalance[worst], 4), "layer": worst, "unused": unused}


def load_by_layer(load: Mapping[int, Tensor]) -> dict[str, dict[str, Any]]:
    """Return for each layer the `tokens` of each expert, the `entropy` of their shares in nats (ln E is balanced), and
    `max_over_mean`."""
    return {
        str(layer): {
            "tokens": [int(count) for count in tokens.tolist()],
            "entropy": round(entropy(tokens), 4),
            "max_over_mean": round((tokens.max() / tokens.mean()).item(), 4),
        }
        for layer, tokens in load.items()
    }


def _on_host(load: dict[int, Tensor]) -> dict[int, Tensor]:
    """Copy expert load to the host, all layers at once."""
    if not load:
        return {}
    split = torch.cat(list(load.values())).cpu().split([len(tokens) for tokens in load.values()])
    return dict(zip(load, split, strict=True))
