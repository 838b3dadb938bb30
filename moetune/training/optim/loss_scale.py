"""Dynamic loss scaling for float16. The loss is multiplied so that small gradients are not rounded to zero.

float16 rounds magnitudes up to 2^-25 ≈ 3e-8 to zero. Method: "Mixed Precision Training" (arXiv 1710.03740, section
3.2); initial factor and interval as in `torch.amp.GradScaler`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from moetune.errors import UserError


@dataclass
class LossScale:
    """The factor of the loss: halved when a gradient overflows, doubled after `interval` steps without overflow.

    Call `overflowed` or `went_well` once a step. A step with an overflow is skipped by the caller.

    Attributes:
        value: the factor.
        good_steps: number of steps without overflow since the factor changed.
        interval: number of such steps after which the factor is doubled.
    """

    value: float = 2.0**16
    good_steps: int = 0
    interval: int = 2000

    def restore(self, saved: Mapping[str, float]) -> None:
        """Set `value` and `good_steps` to those of a checkpoint."""
        self.value, self.good_steps = float(saved["value"]), int(saved["good_steps"])

    def overflowed(self) -> None:
        """Halve the factor; raise `UserError` below 1, where gradients overflow even without scaling."""
        self.value, self.good_steps = self.value / 2, 0
        if self.value < 1:
            raise UserError(
                "gradients overflow float16 at every loss scale; lower optimizer.lr, or set model.dtype: bf16 or fp32"
            )

    def went_well(self) -> None:
        """Count a step without overflow; double the factor after `interval` of them."""
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.value, self.good_steps = self.value * 2, 0
