"""What the routers do while a model trains: what is logged of it, and what is wrong enough to be said."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from moetune.run.choice import parameters_of
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


class RoutingWarnings(TrainerCallback):
    """Says once that experts which train receive no tokens, and of each layer that its routing has collapsed.

    Args:
        trained: parameters that train, of all ranks.

    Attributes:
        load: tokens that each expert has received since the run began; the trainer's own, which it adds to.
    """

    def __init__(self, run: ResolvedRun, trained: int, console: Console) -> None:
        self.run, self.trained, self.console = run, trained, console
        self.load: dict[int, Tensor] = {}
        self._before: dict[int, Tensor] = {}
        self._told_idle = False
        self._collapsed: set[int] = set()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        load = on_host(self.load)
        since = {layer: tokens - self._before.get(layer, 0) for layer, tokens in load.items()}
        enough = {layer for layer, tokens in since.items() if tokens.mean() >= JUDGED_AFTER}
        self._warn_of_collapse({layer: since[layer] for layer in enough})
        self._before |= {layer: load[layer] for layer in enough}
        if not self._told_idle and load and all(tokens.mean() >= JUDGED_AFTER for tokens in load.values()):
            self._told_idle = True
            self._warn_of_idle(load)

    def _warn_of_idle(self, load: dict[int, Tensor]) -> None:
        idle, idle_parameters = [], 0
        selection = self.run.selection
        for layer in self.run.anatomy.moe_layers:
            for ids, lora in ((selection.experts, None), (selection.lora_experts, selection.lora)):
                unused = [e for e in ids.get(layer.index, ()) if layer.index in load and not load[layer.index][e]]
                idle += [f"{layer.index}:{expert}" for expert in unused]
                idle_parameters += len(unused) * parameters_of(layer, lora)
        if not idle:
            return
        named = ", ".join(idle[:8]) + (f" and {len(idle) - 8} more" if len(idle) > 8 else "")
        self._say(
            f"warning: {len(idle)} experts train and have received no token (layer:expert {named}): "
            f"{100 * idle_parameters / self.trained:.1f} % of what trains stands idle. moetune score and select choose "
            "experts that this data uses"
        )

    def _warn_of_collapse(self, load: dict[int, Tensor]) -> None:
        for layer in self.run.anatomy.moe_layers:
            tokens = load.get(layer.index)
            if tokens is None or layer.index in self._collapsed or layer.top_k >= layer.shape.num_experts:
                continue
            used = torch.tensor(_entropy(tokens)).exp().item()
            if used < COLLAPSED * layer.top_k:
                self._collapsed.add(layer.index)
                self._say(
                    f"warning: routing of layer {layer.index} has collapsed: of {layer.shape.num_experts} experts "
                    f"{used:.1f} are in use (the exponential of the load's entropy), and a token takes {layer.top_k}. "
                    "train.router_aux_loss holds against it; a lower optimizer.router.lr moves routers less"
                )

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)


def _entropy(tokens: Tensor) -> float:
    """Of the shares, in nats."""
    share = tokens.double() / tokens.sum().clamp(min=1)
    return float(-torch.special.xlogy(share, share).sum())
