"""Dynamic loss scaling: float16 rounds gradients below 6e-8 to zero, so the loss is multiplied by a large number."""

from __future__ import annotations

from dataclasses import dataclass

from moetune.errors import UserError


@dataclass
class LossScale:
    """Halved when a gradient overflows (that step is skipped), doubled after `interval` steps without one.

    As in "Mixed Precision Training" (arXiv 1710.03740, section 3.2); numbers as in `torch.amp.GradScaler`.
    """

    value: float = 2.0**16
    good_steps: int = 0
    interval: int = 2000

    def overflowed(self) -> None:
        """Halve the scale; raise `UserError` where gradients are not finite at any scale."""
        self.value, self.good_steps = self.value / 2, 0
        if self.value < 1:
            raise UserError(
                "gradients overflow float16 at every loss scale; lower optimizer.lr, or set model.dtype: bf16 or fp32"
            )

    def went_well(self) -> None:
        """Double the scale where enough steps have gone well."""
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.value, self.good_steps = self.value * 2, 0
