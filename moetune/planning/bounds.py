"""`Bounds`: what is known of a strategy's memory before it is predicted, from what it stores and from similar runs."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.memory.report import MemoryReport, Phase
from moetune.planning.candidate import Candidate
from moetune.planning.runs import RANKS, Runs
from moetune.planning.stored import Stored, least_bytes
from moetune.planning.strategies import Strategy, strategies
from moetune.run.resolve import ResolvedRun
from moetune.run.resolved import ResolvedModel

_NEARLY = 0.8
"""Share of the GPU from which on, by the lower bound, a strategy is in doubt."""
_UNLIKE = 0.02
"""Share of the GPU by which what a run needs beyond its lower bound may differ between two optimizers."""
UNSURE = 100 << 20
"""Bytes by which a closed form may exceed a trace, and by which a higher rank may need less than `lower` says."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of what a strategy's runs need, and of how much can train with it on one GPU. None takes a prediction.

    Attributes:
        runs: the runs of the model.
        model: the model.
        resolve: resolves a run; raises `UserError` if its settings are wrong.
        usable: bytes of the GPU's memory.
        context: bytes that any process takes of it outside torch's allocator.
        tight: whether a run fits if its expected memory does; else the most that it may need must fit.
    """

    runs: Runs
    model: ResolvedModel
    resolve: Callable[[RunConfig], ResolvedRun]
    usable: int
    context: int
    tight: bool
    _stored: dict[tuple[str, bool], Stored] = field(default_factory=dict, init=False, repr=False, compare=False)

    def lower(self, strategy: Strategy, amount: int) -> int:
        """Return a lower bound, in bytes, of the GPU memory that a run needs: the context, and what it stores
        (`least_bytes`). A strategy whose bound exceeds the GPU need not be recorded.

        Args:
            strategy: the strategy.
            amount: how much trains, as `Candidate.amount`.
        """
        config, is_lora = self.runs.smallest(strategy), strategy.goal == "lora"
        key = config.model.base, config.model.double_quant
        if key not in self._stored:
            self._stored[key] = Stored.of(self.model, config.model)
        trained = {"lora": amount * self._of_each_rank} if is_lora else {"experts": amount}
        return self.context + least_bytes(config, self._stored[key], **trained)

    @cached_property
    def _of_each_rank(self) -> int:
        """Number of LoRA's parameters for each unit of its rank; 0 if the model cannot have it."""
        structure = self.runs.structure
        try:
            run = self.resolve(self.runs.smallest(next(strategies("lora", structure, 1))))
        except UserError:
            return 0
        lora, linears = run.config.adapt.lora, structure.lora_layers()
        sizes = [linears[path] for path in run.selection.lora_linears]
        shapes = {layer.index: layer.shape for layer in structure.moe_layers}
        of_experts = sum(
            len(ids) * shapes[layer].trained_parameters(lora, 1) for layer, ids in run.selection.lora_experts.items()
        )
        return sum(one.in_features + one.out_features for one in sizes) + of_experts

    def may_fit(self, strategy: Strategy) -> bool:
        """Return False if even a strategy's smallest run surely exceeds the GPU, by `lower`; True is no promise."""
        return self.lower(strategy, self.runs.least(strategy)) <= self.usable

    def is_doubtful(self, strategy: Strategy) -> bool:
        """Return whether a strategy hardly fits by `lower`, so that its smallest run is to be predicted before any
        larger one."""
        return self.lower(strategy, 0) > _NEARLY * self.usable

    def at_most(self, strategy: Strategy, known: Iterable[Candidate] = ()) -> int:
        """Return an upper bound of the largest `Candidate.amount` that fits, by `lower`; 0 if nothing fits.

        `known` are candidates that fit. Those that differ from the strategy in the optimizer only show what a run needs
        beyond the lower bound (`beyond`); the result is then an estimate, not a bound.
        """
        alike = (one for one in known if one.strategy.differs_in_optimizer(strategy))
        return self.most_with(strategy, max(map(self.beyond, alike), default=0))

    def most_with(self, strategy: Strategy, beyond: int) -> int:
        """Return the largest `Candidate.amount` of which `lower` plus `beyond` bytes fits; 0 if none does."""
        sizes: Sequence[int] = range(1, self.runs.most("experts") + 1) if strategy.goal == "experts" else RANKS
        fitting = bisect_right(sizes, self.usable - beyond, key=partial(self.lower, strategy))
        return sizes[fitting - 1] if fitting and strategy.goal != "router" else 0

    def beyond(self, one: Candidate) -> int:
        """Return the bytes that a run needs beyond `lower`, less what another optimizer may change of them.

        0 if that says nothing of other optimizers: it has several rows, updates in the backward pass, or needs most
        when it updates or loads weights.
        """
        report, strategy = one.report, one.strategy
        if one.config.train.micro_batch > 1 or not strategy.updates_at_the_end:
            return 0
        if _fullest_phase(report) in (None, "load", "optimizer"):
            return 0
        needs = self.usable - self._left(report)
        return max(0, needs - self.lower(strategy, one.amount) - int(_UNLIKE * self.usable))

    def exceeds(self, strategy: Strategy, rank: int, lower_rank: int, report: MemoryReport) -> bool:
        """Return whether a run with LoRA of a rank surely exceeds the GPU, from the report of a run of a lower rank.

        Where a step needs most, all exists that `lower` counts, because gradients accumulate; but not where it
        generates or evaluates. So memory grows with the rank by what `lower` grows, or more, except for optimizer
        states of small factors, which are in 32 bits (less than `UNSURE`).
        """
        if _fullest_phase(report) not in ("forward", "recompute", "backward", "optimizer"):
            return False
        grows = self.lower(strategy, rank) - self.lower(strategy, lower_rank)
        return grows > self._left(report) + UNSURE

    def _left(self, report: MemoryReport) -> int:
        """Return the bytes that a run leaves free on the GPU, negative if it does not fit."""
        left = report.headroom_bytes if self.tight else report.least_headroom
        assert left is not None
        return left

    @cached_property
    def inputs(self) -> int:
        """Bytes of the inputs of all decoder layers in one row."""
        hidden = self.model.settings.get_text_config().hidden_size
        length = self.runs.start.train.sequence_length
        return int(self.runs.structure.num_layers * length * hidden * self.model.dtype.itemsize)


def _fullest_phase(report: MemoryReport) -> Phase | None:
    """Return the phase in which a run needs most memory of the GPU; None if that is not known."""
    if report.load.gpu >= report.fullest.peak_allocated:
        return "load"
    return None if report.moment is None else report.moment.phase
