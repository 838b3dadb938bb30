"""`Candidate`: a strategy's largest run that fits, as a plan shows it."""

from dataclasses import dataclass
from typing import Any

from moetune.config.schema import RunConfig
from moetune.memory.report import MemoryReport
from moetune.planning.strategies import Goal, Strategy


@dataclass(frozen=True)
class NextLarger:
    """The next larger run of a strategy, which does not fit, or not surely.

    Attributes:
        what: its size in words, such as `3 layers × 2 experts` or `rank 32`.
        config: its configuration.
        report: its predicted memory; None before it is predicted (`Search.reported`).
    """

    what: str
    config: RunConfig
    report: MemoryReport | None = None

    @property
    def risk(self) -> str:
        """What would happen to it, in words; it is predicted."""
        assert self.report is not None
        return "may run out of memory" if self.report.verdict == "tight" else "would not fit"

    def to_json(self) -> dict[str, Any]:
        """Return the object `beyond` of a candidate; it is predicted."""
        assert self.report is not None
        return {
            "what": self.what,
            "required_bytes": self.report.required,
            "required_range": self.report.span.to_json(),
            "verdict": self.report.verdict,
        }


@dataclass(frozen=True)
class Candidate:
    """The largest run of a strategy that fits.

    Attributes:
        strategy: the strategy.
        config: its configuration.
        report: its predicted memory.
        amount: how much trains: experts in all layers together for the goal `experts`, the rank for `lora`, 0 for
            `router`.
        next_larger: the next larger run, which does not fit, or not surely; None if there is nothing larger.
    """

    strategy: Strategy
    config: RunConfig
    report: MemoryReport
    amount: int
    next_larger: NextLarger | None = None

    @property
    def speed(self) -> float:
        """Estimated tokens per second; 0 if unknown."""
        return 0.0 if self.report.time is None else self.report.time.tokens_per_second.middle

    @property
    def goal(self) -> Goal:
        return self.strategy.goal

    @property
    def trains(self) -> str:
        """What trains as text, such as `LoRA rank 16 on attention, experts`."""
        return dict(self.report.about)["trains"]

    @property
    def optimizer(self) -> str:
        """The optimizer as text, such as `adamw, float32 master weights`."""
        return dict(self.report.about)["optimizer"]

    def to_json(self, tokens: int | None = None) -> dict[str, Any]:
        """Return the candidate as an object of `moetune plan --json`; with `tokens`, including the hours of
        training."""
        report, larger = self.report, self.next_larger
        time = report.time
        return {
            "goal": self.goal,
            "run": self.config.model_dump(mode="json", exclude_unset=True),
            "trains": self.trains,
            "gives_up": list(self.strategy.gives_up),
            **report.figures(),
            "fullest_phase": None if report.moment is None else report.moment.phase,
            "fits": report.fits,
            "tokens_per_second_estimate": None if time is None else time.tokens_per_second.middle,
            "tokens_per_second": None if time is None else time.tokens_per_second.to_json(),
            "hours": None if time is None or tokens is None else time.hours(tokens).to_json(),
            "beyond": None if larger is None else larger.to_json(),
        }
