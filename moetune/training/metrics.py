"""Metrics of training steps, summed from one line of `metrics.jsonl` to the next.

*Expert load* is the number of tokens that each expert of a layer received: a dict of layer index -> tensor [E].
"""

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
from moetune.training.step.router_losses import add_load
from moetune.training.step.stepper import Reduced


@dataclass(frozen=True)
class Pace:
    """Predicted work of a step and peak speed of the GPU, with which the measured speed is compared.

    Attributes:
        flops: floating-point operations of matrix products and attention in one step of one rank; None if not counted.
        limit: floating-point operations per second at the GPU's peak; None if not known.
    """

    flops: int | None = None
    limit: int | None = None

    def metrics(self, updates: int, seconds: float, left: int) -> dict[str, float | None]:
        """Return `flops` (of one step), `share_of_limit` (speed over `limit`, 0 to 1) and `seconds_left` for a line of
        metrics; a number that cannot be known is None.

        `updates` steps took `seconds`, and `left` steps remain.
        """
        share = None
        if self.flops is not None and self.limit is not None:
            share = round(self.flops * updates / seconds / self.limit, 4)
        left_for = round(left * seconds / updates, 1) if updates else None
        return {"flops": self.flops, "share_of_limit": share, "seconds_left": left_for}


@dataclass
class Sums:
    """Sums over micro-steps of this rank.

    Attributes:
        load: expert load.
        router_loss: sum of the weighted router losses, a scalar; None if router losses are off.
        positions: number of tokens, padding included.
        tokens: number of tokens, padding excluded.
    """

    load: dict[int, Tensor] = field(default_factory=dict)
    router_loss: Tensor | None = None
    positions: int = 0
    tokens: int = 0

    def add(self, done: "MicroStep | Sums", positions: int, tokens: int) -> None:
        """Add a micro-step, or the sums over several, with its number of `positions` and `tokens`."""
        add_load(self.load, done.load)
        if done.router_loss is not None:
            self.router_loss = done.router_loss if self.router_loss is None else self.router_loss + done.router_loss
        self.positions += positions
        self.tokens += tokens


@dataclass
class Interval:
    """Sums over the steps since the last line of metrics.

    Attributes:
        losses: the loss of each step that was not skipped, scalars.
        updates: number of steps, skipped ones included.
        timed_updates: number of steps since `since`.
        since: time from which speed is measured, in seconds of `time.perf_counter`.
    """

    sums: Sums = field(default_factory=Sums)
    losses: list[Tensor] = field(default_factory=list)
    updates: int = 0
    timed_updates: int = 0
    since: float = field(default_factory=time.perf_counter)

    def add(self, sums: Sums, reduced: Reduced) -> None:
        """Add a step; a step that was skipped for a non-finite gradient adds no loss."""
        self.sums.add(sums, sums.positions, sums.tokens)
        self.updates += 1
        self.timed_updates += 1
        if reduced.scale is not None:
            self.losses.append(reduced.loss)

    def restart_clock(self) -> None:
        """Measure speed from now on, so that the time of an evaluation does not count; other sums are kept."""
        self.since, self.sums.positions, self.timed_updates = time.perf_counter(), 0, 0

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
        """Return the line of `metrics.jsonl` for this interval, over all ranks; every rank must call this.

        `warnings` checks the interval, prints warnings and adds its own keys to the line.

        Args:
            step: number of updates since the run began.
            left: number of steps until the end of the run.
            lr: learning rate of the last update, of the first parameter group.
            norm: gradient norm of the last step before clipping, a scalar.
            moves: whether the learning rate was above 0 and past the warmup, so that weights should have changed.
            total_load: expert load since the run began; the load of this interval is added in place.
        """
        loss = torch.stack(self.losses).mean().item() if self.losses else None
        seconds = time.perf_counter() - self.since
        load = {layer: ranks.total_over_data(tokens) for layer, tokens in self.sums.load.items()}
        load = ranks.of_all_stages(load)
        add_load(total_load, load)
        load = {layer: tokens.cpu() for layer, tokens in load.items()}
        by_layer = load_by_layer(load)
        router_loss = self.sums.router_loss
        if router_loss is not None:
            router_loss = ranks.total_over_stages(ranks.total_over_data(router_loss)) / self.updates
        updated = bool(self.losses) and moves and norm.item() > 0
        return {
            "step": step,
            "loss": loss,
            "router_loss": None if router_loss is None else router_loss.item(),
            "lr": lr,
            "grad_norm": norm.item() if math.isfinite(norm.item()) else None,  # JSON has no NaN
            "skipped_steps": self.updates - len(self.losses),
            "tokens_per_second": round(self.sums.positions * ranks.data_size / seconds, 1),
            **pace.metrics(self.timed_updates, seconds, left),
            "peak_allocated": torch.cuda.max_memory_allocated(norm.device) if norm.is_cuda else None,
            "expert_load": load_summary(by_layer),
            "routing": by_layer,
            **warnings.about_step(updated, load, {layer: tokens.cpu() for layer, tokens in total_load.items()}),
        }


def load_summary(by_layer: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Summarize what `load_by_layer` returned; an empty dict if there is no load.

    Returns:
        `max_over_mean`: largest over mean load, in the layer where it is highest: from 1 (balanced) to E / K.
        `layer`: the index of that layer.
        `unused`: the number of experts, in all layers, that received no token.
    """
    if not by_layer:
        return {}
    worst = max(by_layer, key=lambda layer: by_layer[layer]["max_over_mean"])
    unused = sum(layer["tokens"].count(0) for layer in by_layer.values())
    return {"max_over_mean": by_layer[worst]["max_over_mean"], "layer": int(worst), "unused": unused}


def load_by_layer(load: Mapping[int, Tensor]) -> dict[str, dict[str, Any]]:
    """Return layer index, as text -> statistics of the layer's load, a dict with the keys below.

    Returns:
        `tokens`: tokens that each expert received, a list of E numbers.
        `entropy`: entropy of the experts' shares of the tokens, in nats; ln E is balanced.
        `max_over_mean`: the largest load over the mean load.
    """
    return {
        str(layer): {
            "tokens": [int(count) for count in tokens.tolist()],
            "entropy": round(entropy(tokens), 4),
            "max_over_mean": round((tokens.max() / tokens.mean()).item(), 4),
        }
        for layer, tokens in load.items()
    }
