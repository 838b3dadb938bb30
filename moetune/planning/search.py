"""`Search`: the largest run of one strategy that fits a GPU: most experts or highest rank, then most rows at once.

Recording a closed form takes seconds, evaluating it a tenth of a second (memory/closed_form/).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

from moetune.adapt.documents import layers_with_state
from moetune.config.schema import RunConfig
from moetune.errors import counted
from moetune.memory.assumed_routing import UNKNOWN, AssumedRouting
from moetune.memory.changes import changed, surely_left
from moetune.memory.closed_form.lora_ranks import probes_of as probed_ranks
from moetune.memory.report import MemoryReport
from moetune.memory.trace.alike import Stack
from moetune.models.catalog.gpus import Gpu, find_gpu
from moetune.models.stack import made_alike
from moetune.models.structure import ModelStructure
from moetune.planning.bounds import UNSURE, Bounds
from moetune.planning.candidate import Candidate, NextLarger, worth
from moetune.planning.expert_search import ExpertSearch
from moetune.planning.kept import read_beyond, read_candidate, what_decides, write_beyond, write_candidate
from moetune.planning.predictor import Predictor
from moetune.planning.runs import RANKS, Runs
from moetune.planning.solve import headroom, last_that_fits
from moetune.planning.strategies import Strategy
from moetune.run.resolve import resolve_model
from moetune.run.resolved import ResolvedModel
from moetune.training.trl import InTrl

ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Sizes of a micro-batch, in rows, that a search tries (`Search.rows`)."""


@dataclass(frozen=True)
class Search:
    """A search for the largest runs of one model on one GPU.

    Call `largest` for each strategy of which `bounds.may_fit` is true, and `traced` to confirm what it found.

    Attributes:
        start: configuration with the model, the GPU and the length of a sequence, to which a strategy's settings are
            added.
        structure: the model's layers and parameters.
        predictor: predicts the runs.
        usable: bytes of the GPU's memory.
        context: bytes that any process takes of it outside torch's allocator.
        margin: bytes that a prediction by closed form must leave free, because a trace exceeded the closed form by
            them.
        tight: whether a run fits if its expected memory does; else the most that it may need must fit.
    """

    start: RunConfig
    structure: ModelStructure
    predictor: Predictor
    usable: int
    context: int = 0
    margin: int = 0
    tight: bool = False

    @classmethod
    def of(
        cls,
        start: RunConfig,
        card: Gpu | None = None,
        *,
        tight: bool = False,
        routing: AssumedRouting | None = None,
        trainer: InTrl | None = None,
    ) -> "Search":
        """Return a search for the model in `model.path` of the configuration `start`.

        Args:
            card: the GPU; None: that in `hardware.gpu`.
            tight: as in the attributes.
            routing: how many tokens each expert is assumed to receive; None: not known.
            trainer: the trainer of TRL that the runs are for; None for moetune's own.
        """
        if card is None:
            assert start.hardware.gpu is not None
            card = find_gpu(start.hardware.gpu)
        predictor = Predictor(card, routing or UNKNOWN, "expected" if tight else "high", trainer=trainer)
        structure, context = resolve_model(start.model).structure, card.context_range[0]
        return cls(start, structure, predictor, card.memory.value, context, tight=tight)

    @cached_property
    def _model(self) -> ResolvedModel:
        return resolve_model(self.start.model)

    @cached_property
    def runs(self) -> Runs:
        """The runs that are compared."""
        return Runs(self.start, self.structure)

    @cached_property
    def bounds(self) -> Bounds:
        """What is known of a strategy before it is predicted."""
        return Bounds(self.runs, self._model, self.predictor.resolve, self.usable, self.context, self.tight)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Sizes of a micro-batch to try. Layers with a state take as long for each document whatever the size, and a
        record serves a single size (memory/closed_form/): of a model that has such layers only one row is tried."""
        return ROWS[:1] if layers_with_state(self._model.plain) else ROWS

    @property
    def left(self) -> Callable[[MemoryReport], int]:
        """Function from a report to the bytes left free on GPU or host, whichever has less; negative if none are. The
        run is taken to need what is expected if `tight`, else the most that it may."""
        return headroom if self.tight else surely_left

    @cached_property
    def depths(self) -> list[int]:
        """Numbers of layers whose experts may train, ascending: 1; the numbers that share a record, or all from the
        smallest of these if most do; and the number of all layers."""
        made = list(made_alike(self._model.plain).values())
        alike: dict[Hashable, list[int]] = {}
        for number, layer in enumerate(self.runs.layers, 1):
            kinds = [(one, place in self.runs.layers and place <= layer) for place, one in enumerate(made)]
            alike.setdefault(tuple(kinds[place] for place in Stack.of(kinds).kept), []).append(number)
        largest, of_all = max(alike.values(), key=len), len(self.runs.layers)
        # at the ends of a stack, up to five numbers of layers have a record of their own
        shared = [*range(largest[0], of_all)] if 2 * len(largest) >= of_all - 5 else largest
        return sorted({1, *shared, of_all})

    def to_predict(self, found: Candidate) -> list[tuple[RunConfig, bool]]:
        """Return the runs that `traced` asks for first, and for each whether by trace, else by closed form.

        They are that of the candidate, by trace; and the next larger one, by trace if it could fit, by closed form if
        it was not predicted before.
        """
        if self.predictor.trainer is None and self.predictor.takes_minutes(found.config):
            return []
        runs = [(found.config, True)]
        if (larger := found.next_larger) is not None:
            if larger.report is None:
                runs.append((larger.config, False))
            elif self.left(larger.report) >= -UNSURE:
                runs.append((larger.config, True))
        return runs

    def predict(self, run: tuple[RunConfig, bool]) -> None:
        """Predict one of the runs `to_predict`; its report or its record is kept on disk, where `traced` finds it."""
        config, by_trace = run
        (self.predictor.traced if by_trace else self.predictor.whole)(config)

    def whole(self, found: Candidate) -> Candidate:
        """Return a candidate with whole reports by closed form, of its run and, if it was predicted, of the next larger
        one."""
        larger = found.next_larger
        if larger is not None and larger.report is not None:
            larger = replace(larger, report=self.predictor.whole(larger.config))
        return replace(found, report=self.predictor.whole(found.config), next_larger=larger)

    def traced(self, found: Candidate) -> Candidate | None:
        """Confirm a candidate by a trace, and also trace the next larger run if it could fit.

        Returns the largest candidate that fits by trace; None if none was found. If trace and closed form disagree on
        whether a run fits, the search is repeated with their difference as margin, at most three times. A candidate
        whose trace `takes_minutes` is returned with its whole report by closed form, which says so in a note.
        """
        if self.predictor.trainer is None and self.predictor.takes_minutes(found.config):
            by_form = self.whole(found)
            note = f"{found.trains}: by closed form, because a trace of so many experts takes minutes"
            return replace(by_form, report=replace(by_form.report, notes=(*by_form.report.notes, note)))
        sure: Candidate | None = None
        now: Candidate | None = found
        margin = 0
        for _ in range(4):
            if now is None:
                break
            report, larger = self.predictor.traced(now.config), now.next_larger
            if self.left(report) >= 0:
                sure = replace(now, report=report)
                if larger is None:
                    break
                if larger.report is None or self.left(larger.report) - margin < -UNSURE:
                    whole = self.predictor.whole(larger.config)
                    return replace(sure, next_larger=replace(larger, report=whole))
                more = self.predictor.traced(larger.config)
                if self.left(more) < 0:
                    return replace(sure, next_larger=replace(larger, report=more))
                margin = self.left(larger.report) - self.left(more)
            elif sure is not None:
                break
            else:
                margin += max(self.left(now.report) - self.left(report), 1)
            now = replace(self, margin=margin).found(found.strategy)
        return sure

    def found(self, strategy: Strategy, more_than: int = 0) -> Candidate | None:
        """Return what `largest` finds, read from disk if it was searched for before (kept.py)."""
        if (known := self.known(strategy, more_than)) is not None:
            return known[0]
        found = self.largest(strategy, more_than)
        write_candidate(self._about, strategy, more_than, found)
        return found

    def known(self, strategy: Strategy, more_than: int = 0) -> tuple[Candidate | None] | None:
        """Return what `found` reads from disk, as a tuple of one; None if it would search."""
        return read_candidate(self._about, strategy, more_than)

    @cached_property
    def _about(self) -> dict[str, Any]:
        """All that a search depends on except the strategy and what another one trains."""
        of, start = self.predictor, self.start.model_dump(mode="json", exclude={"output"})
        about = what_decides(start, self._model, of.gpu, of.routing, of.trainer)
        return about | {"margin": self.margin, "tight": self.tight}

    def largest(self, strategy: Strategy, more_than: int = 0) -> Candidate | None:
        """Return the largest run of a strategy that fits by closed form; None if its smallest run does not fit.

        `more_than` is what another strategy trains, as `Candidate.amount`. None also if no run that fits trains enough
        more than that (`worth`).
        """
        if self._exceeds(strategy):
            return None
        match strategy.goal:
            case "experts":
                found = self._most_experts(strategy, more_than)
            case "lora":
                found = self._highest_rank(strategy, more_than)
            case "router":
                config = self.runs.smallest(strategy)
                report = self.predictor.of(config)
                found = Candidate(strategy, config, report, 0) if self.left(report) >= self.margin else None
        return None if found is None else self._most_rows(found)

    def _exceeds(self, strategy: Strategy) -> bool:
        """Return whether even a strategy's smallest run is known not to fit: by what another optimizer needs beyond the
        lower bound, or, where that is in doubt, by a prediction; larger runs would take more records to find it out.

        Of what a run needs beyond the bound, what grows with what it trains, such as gathered factors of LoRA, is taken
        to grow no more than the bound.
        """
        least, (amount, beyond) = self.runs.least(strategy), read_beyond(self._about, strategy)
        bound = self.bounds.lower(strategy, least)
        grows = max(0, self.bounds.lower(strategy, amount) - bound)
        if bound + beyond - grows - strategy.offloads_inputs * self.bounds.inputs > self.usable:
            return True
        if not self.bounds.is_doubtful(strategy):
            return False
        smallest = self.runs.smallest(strategy)
        report = self.predictor.of(smallest)
        self._note_beyond(Candidate(strategy, smallest, report, least))
        return self.left(report) < self.margin

    def _note_beyond(self, one: Candidate) -> None:
        """Write `beyond` of a run to disk, for searches of other optimizers, if it says something of them."""
        if not one.strategy.offloads_inputs and (beyond := self.bounds.beyond(one)):
            write_beyond(self._about, one.strategy, one.amount, beyond)

    def is_largest(self, found: Candidate) -> bool:
        """Return whether a candidate trains the most that any strategy can train, with the largest micro-batch."""
        return found.amount >= self.runs.most(found.goal) and found.config.train.micro_batch >= self.rows[-1]

    # --- Experts ----------------------------------------------------------------------------------------------

    def _most_experts(self, strategy: Strategy, more_than: int) -> Candidate | None:
        """Find the run with most experts that fits (expert_search.py); None if they are not more than
        `worth(more_than)`."""

        runs, depths, step = self.runs, self.depths, strategy.step

        @cache
        def report(layers: int, each: int) -> MemoryReport:
            return self.predictor.of(runs.of_experts(strategy, layers, each))

        search = ExpertSearch(
            len(runs.layers),
            runs.experts,
            depths,
            step,
            self.bounds.at_most(strategy),
            partial(self.bounds.lower, strategy),
            report,
            self.left,
            self.margin,
        )
        layers, each = search.most(more_than)
        if layers * each <= worth(more_than):
            if not more_than:  # even the smallest does not fit
                self._note_beyond(Candidate(strategy, runs.smallest(strategy), report(1, step), step))
            return None
        candidate = Candidate(strategy, runs.of_experts(strategy, layers, each), report(layers, each), layers * each)
        more = bisect_right(depths, layers)
        if more < len(depths):
            larger = depths[more], each
        elif each + step <= runs.experts:
            larger = depths[bisect_left(depths, -(-(layers * each + 1) // (each + step)))], each + step
        else:
            return candidate
        what = f"{counted(larger[0], 'layer')} × {counted(larger[1], 'expert')}"
        return replace(candidate, next_larger=NextLarger(what, runs.of_experts(strategy, *larger), report(*larger)))

    # --- LoRA, and rows ---------------------------------------------------------------------------------------

    def _highest_rank(self, strategy: Strategy, more_than: int) -> Candidate | None:
        """Find the highest rank in `RANKS` that fits; None if none above `more_than` does."""
        if self.bounds.at_most(strategy) <= more_than:
            return None
        configs, least = [self.runs.of_rank(strategy, rank) for rank in RANKS], bisect_right(RANKS, more_than)
        if probed_ranks(self.predictor.resolve(configs[0])):
            start = len(RANKS) - 1  # the records of lower ranks are derived from that of the highest
        else:
            expected = self.bounds.most_with(strategy, read_beyond(self._about, strategy)[1])
            start = max(least, RANKS.index(expected)) if expected else least
        report = self.predictor.of(configs[start])
        self._note_beyond(Candidate(strategy, configs[start], report, RANKS[start]))
        parts = report.fullest.parts
        grows = parts.trainable_weights + parts.master_weights + parts.optimizer_states + parts.gradients
        last, found, larger = self._along(
            "rank",
            RANKS,
            configs,
            start,
            least,
            known={start: report},
            slope=grows / RANKS[start],
            exceeds=lambda larger, fits, its: self.bounds.exceeds(strategy, RANKS[larger], RANKS[fits], its),
        )
        if found is not None:
            return Candidate(strategy, configs[last], found, RANKS[last], larger)
        assert larger is not None
        assert larger.report is not None
        self._note_beyond(Candidate(strategy, larger.config, larger.report, RANKS[least]))
        return None

    def _most_rows(self, found: Candidate) -> Candidate:
        """Return the candidate with the largest micro-batch in `rows` that fits, and `train.accumulate` divided by it
        (at least 1)."""
        configs = [found.config]
        for rows in self.rows[1:]:
            accumulate = max(1, found.config.train.accumulate // rows)
            configs.append(changed(found.config, {"train.micro_batch": rows, "train.accumulate": accumulate}))
        # runs that train whole experts seldom have room for many rows
        start = min(1 if found.goal == "experts" else len(ROWS), len(self.rows) - 1)
        last, report, larger = self._along("micro-batch", self.rows, configs, start, known={0: found.report})
        assert report is not None
        return replace(found, config=configs[last], report=report, next_larger=found.next_larger or larger)

    def _along(
        self,
        what: str,
        sizes: Sequence[int],
        configs: Sequence[RunConfig],
        start: int,
        least: int = 0,
        *,
        known: dict[int, MemoryReport] | None = None,
        slope: float = 0,
        exceeds: Callable[[int, int, MemoryReport], bool] | None = None,
    ) -> tuple[int, MemoryReport | None, NextLarger | None]:
        """Search runs of growing memory for the last that fits. Return its index, or `least` - 1; its report, or None;
        and the next larger run, or None.

        Args:
            what: the name of the size that grows, such as `rank`.
            sizes: the sizes.
            configs: the configuration with each size.
            start: the index to predict first.
            least: the first index that counts.
            known: the reports that were made before, by index.
            slope: bytes that one more of `sizes` is expected to need; 0 if unknown.
            exceeds: as in `last_that_fits`, with indices.
        """
        last, reports = last_that_fits(
            len(sizes),
            lambda number: self.predictor.of(configs[number]),
            start,
            least,
            margin=self.margin,
            known=known,
            left=self.left,
            sizes=sizes,
            slope=slope,
            exceeds=exceeds,
        )
        if last + 1 == len(sizes):
            return last, reports[last], None
        return (
            last,
            reports.get(last),
            NextLarger(f"{what} {sizes[last + 1]}", configs[last + 1], reports.get(last + 1)),
        )
