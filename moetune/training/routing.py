"""What the routers do while a model trains: what is logged of it, and what is wrong enough to be said."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from moetune.run.resolve import ResolvedRun

JUDGED_AFTER = 32
"""Tokens that each expert would have received by then, were all alike: before that, none is not strange."""
COLLAPSED = 1.1
"""Times K, the effective number of experts below which nearly every token goes to the same K."""


def load_summary(load: dict[int, Tensor]) -> dict[str, float]:
    """Expert load in three numbers: `max_over_mean` of the most uneven layer (1 is balanced, E / K the worst), that
    `layer`, and how many experts of all layers were `unused`."""
    if not load:
        return {}
    imbalance = {layer: (tokens.max() / tokens.mean()).item() for layer, tokens in load.items()}
    worst = max(imbalance, key=imbalance.__getitem__)
    unused = sum(int((tokens == 0).sum()) for tokens in load.values())
    return {"max_over_mean": round(imbalance[worst], 4), "layer": worst, "unused": unused}


def load_by_layer(load: dict[int, Tensor]) -> dict[str, dict[str, Any]]:
    """For each layer the `tokens` of each expert, the `entropy` of their shares in nats (ln E is balanced), and
    `max_over_mean`."""
    return {
        str(layer): {
            "tokens": [int(count) for count in tokens.tolist()],
            "entropy": round(_entropy(tokens), 4),
            "max_over_mean": round((tokens.max() / tokens.mean()).item(), 4),
        }
        for layer, tokens in load.items()
    }


def on_host(load: dict[int, Tensor]) -> dict[int, Tensor]:
    """The same on the host: one transfer for all layers."""
    if not load:
        return {}
    split = torch.cat(list(load.values())).cpu().split([len(tokens) for tokens in load.values()])
    return dict(zip(load, split, strict=True))


def idle_experts(run: ResolvedRun, load: dict[int, Tensor]) -> dict[tuple[int, int], int]:
    """(layer, expert) -> its parameters that train, of those that train or have LoRA and received no token."""
    idle, selection = {}, run.selection
    for layer in run.structure.moe_layers:
        for ids, lora in ((selection.experts, None), (selection.lora_experts, selection.lora)):
            for expert in ids.get(layer.index, ()):
                if layer.index in load and not load[layer.index][expert]:
                    idle[layer.index, expert] = layer.shape.trained_parameters(lora)
    return idle


def collapsed(run: ResolvedRun, load: dict[int, Tensor]) -> dict[int, float]:
    """Layer -> its effective number of experts, the exponential of the load's entropy, where that is hardly above K."""
    found = {}
    for layer in run.structure.moe_layers:
        if layer.index in load and layer.top_k < layer.shape.num_experts:
            used = math.exp(_entropy(load[layer.index]))
            if used < COLLAPSED * layer.top_k:
                found[layer.index] = used
    return found


def is_enough(tokens: Tensor) -> bool:
    """Whether the load of a layer says something of its experts."""
    return tokens.mean().item() >= JUDGED_AFTER


def _entropy(tokens: Tensor) -> float:
    """Of the shares, in nats."""
    share = tokens.double() / tokens.sum().clamp(min=1)
    return float(-torch.special.xlogy(share, share).sum())
