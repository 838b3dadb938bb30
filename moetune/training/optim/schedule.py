"""The learning rate over a run."""

from __future__ import annotations

import math

from moetune.config.schema import TrainConfig


def rate_factor(train: TrainConfig, step: int) -> float:
    """Return what each part's learning rate is multiplied by in an update, of which `step` came before.

    It rises linearly over `train.warmup` steps; then it stays 1, or falls to 0 at `train.steps`.
    """
    if step < train.warmup:
        return step / train.warmup
    progress = (step - train.warmup) / max(1, train.steps - train.warmup)
    match train.schedule:
        case "linear":
            return max(0.0, (train.steps - step) / max(1, train.steps - train.warmup))
        case "cosine":
            return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
    return 1.0
