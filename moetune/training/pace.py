"""What a step computes, against the clock: operations, the share of what the card can do, the time left."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Of a run on one kind of card.

    Attributes:
        flops: operations of a step's products and attention, on one rank; None where they were not counted.
        limit: operations a second that the card can do; None if that is not known.
    """

    flops: int | None = None
    limit: int | None = None

    def metrics(self, updates: int, seconds: float, left: int) -> dict[str, float | None]:
        """Of the last `updates`, which took `seconds`, with so many `left`."""
        share = None
        if self.flops is not None and self.limit is not None:
            share = round(self.flops * updates / seconds / self.limit, 4)
        return {
            "flops": self.flops,
            "share_of_limit": share,
            "seconds_left": round(left * seconds / updates, 1) if updates else None,
        }
