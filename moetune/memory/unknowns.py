"""`Unknown`: what a prediction cannot know, as bytes below and above what is expected.

Explained in docs/concepts/allocator.md, with the sources of the figures.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moetune.memory.allocator import LARGE_PAGE, SMALL_PAGE
from moetune.models.catalog.gpus import Gpu

Verdict = Literal["yes", "tight", "no"]
"""Whether GPU and host can hold a run: `yes` if the most that it may need fits, `no` if the least does not."""
Cause = Literal["routing", "context", "allocator", "prediction"]
ERROR = 0.005
"""Largest relative error of a prediction that was seen (docs/benchmarks/predict_vs_measured_cuda.md), rounded up."""
FRAGMENTATION = 0.015
"""Share of the needed memory that torch's allocator may hold beyond it on a full card: free blocks that lie between
tensors in use. Source: docs/benchmarks/near_the_line.md, where runs that took up to 99.1 % of a card ran."""
PAGES = LARGE_PAGE + SMALL_PAGE
"""Bytes that rounding up takes at most with expandable segments: one page of the large pool, and one of the small."""


@dataclass(frozen=True)
class Unknown:
    """Something that a prediction does not know.

    Attributes:
        cause: what is not known: routing, the CUDA context, the allocator's free blocks, or the prediction's error.
        below, above: bytes by which the run may need less, and more, than expected.
        why: what the bytes stand for, for the user.
    """

    cause: Cause
    below: int
    above: int
    why: str


@dataclass(frozen=True)
class Span:
    """Bytes that a GPU, or the host, must have: the least that a run may need, what is expected, and the most."""

    low: int
    expected: int
    high: int

    def to_json(self) -> dict[str, int]:
        """Return the object under `required_range` in the output of `moetune predict --json`."""
        return {"low": self.low, "expected": self.expected, "high": self.high}

    def verdict(self, size: int) -> Verdict:
        """Return whether memory of `size` bytes can hold the run."""
        if self.low > size:
            return "no"
        return "tight" if self.high > size else "yes"


def of_context(card: Gpu) -> Unknown:
    """Return the CUDA context of a GPU as an unknown: its size differs by driver."""
    low, high = card.context_range
    value = card.context.value
    return Unknown(
        "context", max(0, value - low), max(0, high - value), f"the CUDA context, by driver ({card.context.source})"
    )


def always(required: int, known: tuple[Unknown, ...]) -> Iterator[Unknown]:
    """Yield the unknowns of every run: free blocks that the allocator cannot return, and the prediction's error.

    Args:
        required: the bytes that the run is expected to need.
        known: the run's other unknowns; the bytes that they may add make both larger.
    """
    most = required + sum(unknown.above for unknown in known)
    lost = max(PAGES, int(most * FRAGMENTATION))
    yield Unknown("allocator", 0, lost, "pages of torch's allocator that are partly free, between tensors in use")
    why = "the largest difference of prediction and measurement that was seen"
    yield Unknown("prediction", int(required * ERROR), int(most * ERROR), why)


def span(required: int, unknowns: tuple[Unknown, ...]) -> Span:
    """Return the span of the bytes that a run needs, from those expected (`required`) and all unknowns: `unknowns` and
    those of `always`."""
    every = (*unknowns, *always(required, unknowns))
    below, above = sum(unknown.below for unknown in every), sum(unknown.above for unknown in every)
    return Span(required - below, required, required + above)
