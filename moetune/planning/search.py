"""`Search`: the largest run of one strategy that fits a GPU: most experts or highest rank, then most rows at once.

Recording a closed form takes seconds, evaluating it a tenth of a second (memory/closed_form/).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

from moetune.adapt.documents import layers_with_state
from moetune.config.schema import RunConfig
from moetune.errors import UserError, counted
from moetune.memory.assumed_routing import UNKNOWN, AssumedRouting
from moetune.memory.changes import changed, surely_left
from moetune.memory.closed_form.lora_ranks import HIGHEST, LOWEST
from moetune.memory.closed_form.lora_ranks import probes_of as probed_ranks
from moetune.memory.report import MemoryReport
from moetune.memory.trace.alike import Stack
from moetune.models.catalog.gpus import Gpu, find_gpu
from moetune.models.selection import ranges
from moetune.models.stack import made_alike
from moetune.models.structure import ModelStructure
from moetune.planning.bound import Stored, least_bytes
from moetune.planning.candidate import Candidate, NextLarger, worth
from moetune.planning.expert_search import ExpertSearch
from moetune.planning.kept import read_beyond, read_candidate, what_decides, write_beyond, write_candidate
from moetune.planning.predictor import Predictor
from moetune.planning.solve import headroom, last_that_fits
from moetune.planning.strategies import Goal, Strategy, strategies
from moetune.run.resolve import resolve_model
from moetune.run.resolved import ResolvedModel
from moetune.training.trl import InTrl

RANKS = (LOWEST, 8, 16, 32, HIGHEST)
ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Sizes of a micro-batch, in rows, that a search tries (`Search.rows`); `RANKS` are the ranks of LoRA."""
_NEARLY = 0.8
"""Share of the GPU from which on, by the lower bound, a strategy's smallest run is predicted before any larger one."""
_UNSURE = 100 << 20
"""Bytes by which a closed form may exceed a trace: it rounds each pool of reserved memory up to a page."""
_UNLIKE = 0.02
"""Share of the GPU by which what a run needs beyond its lower bound may differ between two optimizers."""


@dataclass(frozen=True)
class Search:
    """A search for the largest runs of one model on one GPU.

    Call `may_fit` and `largest` for each strategy, and `traced` to confirm what `largest` found.

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
    _stored: dict[tuple[str, bool], Stored] = field(default_factory=dict, repr=False)

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
    def layers(self) -> list[int]:
        """Numbers of the decoder layers that have experts."""
        return [layer.index for layer in self.structure.moe_layers]

    @cached_property
    def depths(self) -> list[int]:
        """Numbers of layers whose experts may train, ascending: 1; the numbers that share a record, or all from the
        smallest of these if most do; and the number of all layers."""
        made = list(made_alike(self._model.plain).values())
        alike: dict[Hashable, list[int]] = {}
        for number, layer in enumerate(self.layers, 1):
            kinds = [(one, place in self.layers and place <= layer) for place, one in enumerate(made)]
            alike.setdefault(tuple(kinds[place] for place in Stack.of(kinds).kept), []).append(number)
        largest, of_all = max(alike.values(), key=len), len(self.layers)
        # at the ends of a stack, up to five numbers of layers have a record of their own
        shared = [*range(largest[0], of_all)] if 2 * len(largest) >= of_all - 5 else largest
        return sorted({1, *shared, of_all})

    @cached_property
    def experts(self) -> int:
        """The smallest number of experts of any MoE layer; 0 for a dense model."""
        return min((layer.shape.num_experts for layer in self.structure.moe_layers), default=0)

    def bound(self, strategy: Strategy, amount: int) -> int:
        """Return a lower bound, in bytes, of the GPU memory that a run needs: the context, and what it stores
        (`least_bytes`). A strategy whose bound exceeds the GPU need not be recorded.

        Args:
            strategy: the strategy.
            amount: how much trains, as `Candidate.amount`.
        """
        config, is_lora = self.smallest(strategy), strategy.goal == "lora"
        key = config.model.base, config.model.double_quant
        if key not in self._stored:
            self._stored[key] = Stored.of(self._model, config.model)
        trained = {"lora": amount * self._of_each_rank} if is_lora else {"experts": amount}
        return self.context + least_bytes(config, self._stored[key], **trained)

    @cached_property
    def _of_each_rank(self) -> int:
        """Number of LoRA's parameters for each unit of its rank; 0 if the model cannot have it."""
        try:
            run = self.predictor.resolve(self.of_rank(next(strategies("lora", self.structure, 1)), LOWEST))
        except UserError:
            return 0
        lora, linears = run.config.adapt.lora, self.structure.linears()
        sizes = [linears[path] for path in run.selection.lora_linears]
        shapes = {layer.index: layer.shape for layer in self.structure.moe_layers}
        of_experts = sum(
            len(ids) * shapes[layer].trained_parameters(lora, 1) for layer, ids in run.selection.lora_experts.items()
        )
        return sum(one.in_features + one.out_features for one in sizes) + of_experts

    def may_fit(self, strategy: Strategy) -> bool:
        """Return False if even a strategy's smallest run surely exceeds the GPU, by its `bound`; True is no promise."""
        return self.bound(strategy, self._least(strategy)) <= self.usable

    def _least(self, strategy: Strategy) -> int:
        """Return the `Candidate.amount` of a strategy's smallest run."""
        return {"experts": _step(strategy), "lora": RANKS[0], "router": 0}[strategy.goal]

    def at_most(self, strategy: Strategy, known: Iterable[Candidate] = ()) -> int:
        """Return an upper bound of the largest `Candidate.amount` that fits, by the lower `bound` of its memory; 0 if
        nothing fits.

        `known` are candidates that fit. Those that differ from the strategy in the optimizer only show what a run needs
        beyond the lower bound (`beyond`); the result is then an estimate, not a bound.
        """
        alike = (one for one in known if one.strategy.differs_in_optimizer(strategy))
        return self._most_within(strategy, self.usable - max(map(self.beyond, alike), default=0))

    def _most_within(self, strategy: Strategy, usable: int) -> int:
        """Return the largest `Candidate.amount` whose lower `bound` is at most `usable` bytes; 0 if there is none."""
        sizes: Sequence[int] = range(1, self.most("experts") + 1) if strategy.goal == "experts" else RANKS
        fitting = bisect_right(sizes, usable, key=partial(self.bound, strategy))
        return sizes[fitting - 1] if fitting and strategy.goal != "router" else 0

    def beyond(self, one: Candidate) -> int:
        """Return the bytes that a run needs beyond its lower `bound`, less what another optimizer may change of them.

        0 if that says nothing of other optimizers: it has several rows, updates in the backward pass, or needs most
        when it updates.
        """
        report, strategy = one.report, one.strategy
        is_one_row = one.config.train.micro_batch == self.rows[0]
        if not (is_one_row and strategy.updates_at_the_end) or report.moment is None:
            return 0
        if report.moment.phase == "optimizer":
            return 0
        left = report.headroom_bytes if self.tight else report.least_headroom
        assert left is not None
        return max(0, self.usable - left - self.bound(strategy, one.amount) - int(_UNLIKE * self.usable))

    def to_trace(self, found: Candidate) -> list[RunConfig]:
        """Return the runs that `traced` begins with: that of a candidate, and the next larger one if it could fit."""
        if self.predictor.trainer is None and self.predictor.takes_minutes(found.config):
            return []
        larger = found.next_larger
        could_fit = larger is not None and self.left(larger.report) >= -_UNSURE
        return [found.config, larger.config] if larger is not None and could_fit else [found.config]

    def trace(self, config: RunConfig) -> None:
        """Trace a run and keep its report on disk, where `traced` finds it."""
        self.predictor.traced(config)

    def traced(self, found: Candidate) -> Candidate | None:
        """Confirm a candidate by a trace, and also trace the next larger run if it could fit.

        Returns the largest candidate that fits by trace; None if none was found. If trace and closed form disagree on
        whether a run fits, the search is repeated with their difference as margin, at most three times. A candidate
        whose trace `takes_minutes` is returned with its whole report by closed form, which says so in a note.
        """
        if self.predictor.trainer is None and self.predictor.takes_minutes(found.config):
            whole, larger = self.predictor.whole(found.config), found.next_larger
            note = f"{found.trains}: by closed form, because a trace of so many experts takes minutes"
            if larger is not None:
                larger = replace(larger, report=self.predictor.whole(larger.config))
            return replace(found, report=replace(whole, notes=(*whole.notes, note)), next_larger=larger)
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
                if self.left(larger.report) - margin < -_UNSURE:
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
                config = self.smallest(strategy)
                report = self.predictor.of(config)
                found = Candidate(strategy, config, report, 0) if self.left(report) >= self.margin else None
        return None if found is None else self._most_rows(found)

    def is_doubtful(self, strategy: Strategy) -> bool:
        """Return whether a strategy hardly fits by its lower `bound`, so that its smallest run is predicted first."""
        return self.bound(strategy, 0) > _NEARLY * self.usable

    def _exceeds(self, strategy: Strategy) -> bool:
        """Return whether even a strategy's smallest run is known not to fit: by what another optimizer needs beyond the
        lower bound, or, where that is in doubt, by a prediction; larger runs would take more records to find it out.

        Of what a run needs beyond the bound, what grows with what it trains, such as gathered factors of LoRA, is taken
        to grow no more than the bound.
        """
        least, (amount, beyond) = self._least(strategy), read_beyond(self._about, strategy)
        bound = self.bound(strategy, least)
        grows = max(0, self.bound(strategy, amount) - bound)
        if bound + beyond - grows - strategy.offloads_inputs * self._inputs > self.usable:
            return True
        if not self.is_doubtful(strategy):
            return False
        smallest = self.smallest(strategy)
        report = self.predictor.of(smallest)
        self._note_beyond(Candidate(strategy, smallest, report, least))
        return self.left(report) < self.margin

    def _note_beyond(self, one: Candidate) -> None:
        """Write `beyond` of a run to disk, for searches of other optimizers, if it says something of them."""
        if not one.strategy.offloads_inputs and (beyond := self.beyond(one)):
            write_beyond(self._about, one.strategy, one.amount, beyond)

    @cached_property
    def _inputs(self) -> int:
        """Bytes of the inputs of all decoder layers in one row."""
        model = self._model
        hidden = model.settings.get_text_config().hidden_size
        return self.structure.num_layers * self.start.train.sequence_length * hidden * model.dtype.itemsize

    def smallest(self, strategy: Strategy) -> RunConfig:
        """Return the smallest run of a strategy: one expert of one layer on each rank that stores experts of its own,
        LoRA of the lowest rank, or all routers."""
        match strategy.goal:
            case "experts":
                return self.of_experts(strategy, 1, _step(strategy))
            case "lora":
                return self.of_rank(strategy, RANKS[0])
        return self._with(strategy, {"adapt.router": "all"})

    def is_largest(self, found: Candidate) -> bool:
        """Return whether a candidate trains the most that any strategy can train, with the largest micro-batch."""
        return found.amount >= self.most(found.goal) and found.config.train.micro_batch >= self.rows[-1]

    def most(self, goal: Goal) -> int:
        """Return the largest `Candidate.amount` that a goal can have: all experts, or the highest rank."""
        return {"experts": len(self.layers) * self.experts, "lora": RANKS[-1], "router": 0}[goal]

    def _with(self, strategy: Strategy, settings: dict[str, Any]) -> RunConfig:
        return changed(self.start, {**strategy.settings, **settings})

    # --- Experts ----------------------------------------------------------------------------------------------

    def of_experts(self, strategy: Strategy, layers: int, each: int) -> RunConfig:
        """Return the run that trains the first `each` experts of each of the first `layers` MoE layers."""
        chosen = {"layers": ranges(self.layers[:layers]), "ids": ranges(range(each))}
        return self._with(strategy, {f"adapt.experts.{key}": value for key, value in chosen.items()})

    def _most_experts(self, strategy: Strategy, more_than: int) -> Candidate | None:
        """Find the run with most experts that fits (expert_search.py); None if they are not more than
        `worth(more_than)`."""

        @cache
        def report(layers: int, each: int) -> MemoryReport:
            return self.predictor.of(self.of_experts(strategy, layers, each))

        step, depths = _step(strategy), self.depths
        bound = partial(self.bound, strategy)
        most = self.at_most(strategy)
        search = ExpertSearch(len(self.layers), self.experts, depths, step, most, bound, report, self.left, self.margin)
        layers, each = search.most(more_than)
        if layers * each <= worth(more_than):
            return None
        candidate = Candidate(strategy, self.of_experts(strategy, layers, each), report(layers, each), layers * each)
        more = bisect_right(depths, layers)
        if more < len(depths):
            larger = depths[more], each
        elif each + step <= self.experts:
            larger = depths[bisect_left(depths, -(-(layers * each + 1) // (each + step)))], each + step
        else:
            return candidate
        what = f"{counted(larger[0], 'layer')} × {counted(larger[1], 'expert')}"
        return replace(candidate, next_larger=NextLarger(what, self.of_experts(strategy, *larger), report(*larger)))

    # --- LoRA, and rows ---------------------------------------------------------------------------------------

    def of_rank(self, strategy: Strategy, rank: int) -> RunConfig:
        """Return the run with LoRA of the given rank on attention and experts (on the MLPs of a dense model)."""
        targets = ["attention", "experts" if self.layers else "dense_mlp"]
        lora = {"rank": rank, "alpha": 2 * rank, "targets": targets}
        return self._with(strategy, {f"adapt.lora.{key}": value for key, value in lora.items()})

    def _highest_rank(self, strategy: Strategy, more_than: int) -> Candidate | None:
        """Find the highest rank in `RANKS` that fits; None if none above `more_than` does."""
        if self.at_most(strategy) <= more_than:
            return None
        configs, least = [self.of_rank(strategy, rank) for rank in RANKS], bisect_right(RANKS, more_than)
        if probed_ranks(self.predictor.resolve(configs[0])):
            start = len(RANKS) - 1  # the records of lower ranks are derived from that of the highest
        else:
            expected = self._most_within(strategy, self.usable - read_beyond(self._about, strategy)[1])
            start = max(least, RANKS.index(expected)) if expected else least
        report = self.predictor.of(configs[start])
        self._note_beyond(Candidate(strategy, configs[start], report, RANKS[start]))
        parts = report.fullest.parts
        grows = parts.trainable_weights + parts.master_weights + parts.optimizer_states + parts.gradients
        last, found, larger = self._along("rank", RANKS, configs, start, least, slope=grows / RANKS[start])
        if found is not None:
            return Candidate(strategy, configs[last], found, RANKS[last], larger)
        assert larger is not None
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
    ) -> tuple[int, MemoryReport | None, NextLarger | None]:
        """Search runs of growing memory for the last that fits. Return its index, or `least` - 1; its report, or None;
        and the next larger run, or None.

        Args:
            what: the name of the size that grows, such as `rank`.
            sizes: the sizes.
            configs: the configuration with each size.
            start: the index to predict first.
            least: the first index that counts.
            known: the report of index 0, if it fits and was predicted before.
            slope: bytes that one more of `sizes` is expected to need; 0 if unknown.
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
        )
        if last + 1 == len(sizes):
            return last, reports[last], None
        return last, reports.get(last), NextLarger(f"{what} {sizes[last + 1]}", configs[last + 1], reports[last + 1])


def _step(strategy: Strategy) -> int:
    """Return the step between numbers of trained experts in each layer: the size of the `ep` axis, so that all ranks
    train equally many and need equal memory, and one record serves every number (memory/closed_form/)."""
    ep: int = strategy.settings.get("parallel.ep", 1)
    return ep
