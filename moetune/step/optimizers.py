"""Optimizers by name, over what trains."""

from __future__ import annotations

import torch
from torch import nn

from moetune.config import OptimizerConfig


def make_optimizer(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Builds the optimizer of a run.

    Weight decay goes to matrices only; biases and norms have none. Implementations are named, not left to torch, which
    chooses differently on a CPU and on a GPU: `fused` keeps no parameter-sized temporary.
    """
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    match config.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        case "adamw8bit":
            from bitsandbytes.optim import AdamW8bit

            return AdamW8bit(groups, lr=config.lr, betas=config.betas, eps=config.eps)
        case "sgd":
            return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
        case unbuilt:
            raise AssertionError(f"{unbuilt} should have been refused by refuse_untrainable")
