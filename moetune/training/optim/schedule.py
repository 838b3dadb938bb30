"""The learning rate schedule: warmup, then constant, linear or cosine."""

import math

from moetune.config.schema import TrainConfig


def rate_factor(train: TrainConfig, step: int) -> float:
    """Return the factor, from 0 to 1, of the learning rates in the update that follows `step` updates.

    With s = `step`, w = `train.warmup` and n = `train.steps`, it is s / w while s < w; from then on

        constant    1
        linear      (n - s) / (n - w)
        cosine      (1 + cos(π·(s - w) / (n - w))) / 2
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
