"""`Search`: a strategy's largest run that fits: most experts or highest rank, then most rows.

Every prediction is a trace of about a second, so few are made: of the strategies that could be the most useful, only
the one that saves most memory is searched; for the others a single run tells whether they train as much.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from moetune.adapt.documents import layers_with_state
from moetune.config.fields import ranges
from moetune.config.schema import RunConfig
from moetune.errors import UserError, counted, one_line
from moetune.memory.assumed_routing import UNKNOWN, AssumedRouting
from moetune.memory.report import MemoryReport
from moetune.models.catalog.gpus import Gpu
from moetune.models.structure import ModelStructure
from moetune.planning.candidate import Candidate, NextLarger
from moetune.planning.fit import headroom, last_that_fits, surely_left
from moetune.planning.predictor import Predictor
from moetune.planning.savings import changed
from moetune.planning.strategies import Strategy
from moetune.run.resolve import resolve_model
from moetune.run.resolved import ResolvedModel
from moetune.training.trl import InTrl

RANKS = (4, 8, 16, 32, 64)
"""Ranks of LoRA that a plan tries."""
ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Sizes of a micro-batch, in rows, that a plan tries."""


@dataclass(frozen=True)
class Size:
    """How much trains in a run of a plan.

    Attributes:
        amount: experts in all layers together, or the rank of LoRA; 0 for routers.
        words: the same in words, such as `3 layers × 2 experts` or `rank 32`.
        settings: values of the run file by dotted key.
    """

    amount: int
    words: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        candidate: the run; None if none fits.
        refused: (strategy, reason) of each strategy that is impossible for the model.
    """

    candidate: Candidate | None
    refused: tuple[tuple[Strategy, str], ...] = ()


@dataclass(frozen=True)
class Search:
    """A search for the largest runs of one model on one GPU.

    Attributes:
        start: configuration with the model, the GPU and the length of a sequence, to which a strategy's settings are
            added.
        gpu: the GPU: a name, a size, or a catalog entry.
        tight: whether a run fits if its expected memory does; else the most that it may need must fit.
        routing: how many tokens each expert is assumed to receive.
        trainer: the trainer of TRL that the runs are for; None for moetune's own.
        simulated: whether the allocator is simulated for what is found.
    """

    start: RunConfig
    gpu: str | Gpu
    tight: bool = False
    routing: AssumedRouting = UNKNOWN
    trainer: InTrl | None = None
    simulated: bool = True

    @cached_property
    def predictor(self) -> Predictor:
        return Predictor(self.gpu, self.routing, "expected" if self.tight else "high", trainer=self.trainer)

    @cached_property
    def _model(self) -> ResolvedModel:
        return resolve_model(self.start.model)

    @property
    def structure(self) -> ModelStructure:
        """The model's layers and parameters."""
        return self._model.structure

    @cached_property
    def _too_large(self) -> set[str]:
        """Storages of which the frozen weights alone exceed the GPU, whatever trains; what trains takes no less."""
        return set()

    @property
    def left(self) -> Callable[[MemoryReport], int]:
        """Function from a report to the bytes left free on GPU or host, whichever has less; negative if none are. The
        run is taken to need what is expected if `tight`, else the most that it may."""
        return headroom if self.tight else surely_left

    def best(self, strategies: Sequence[Strategy]) -> Found:
        """Find the most useful run of strategies that cost equally much (`Strategy.costs`) and divide a run over GPUs
        alike, which are given in the order of what they give up.

        Of one storage the last strategy saves most memory, and so do later storages. So the most that any of them
        trains is what the very last trains; an earlier one is as useful only if it trains as much, which one prediction
        tells. Storages are tried before optimizers, because they come first in the order.
        """
        possible, refused = list[Strategy](), list[tuple[Strategy, str]]()
        for strategy in strategies:
            try:
                self.predictor.resolve(self.smallest(strategy))
                possible.append(strategy)
            except UserError as error:
                refused.append((strategy, one_line(error)))
        try:
            return Found(self._best(possible) if possible else None, tuple(refused))
        except UserError as error:
            return Found(None, (*refused, (possible[-1], one_line(error))))

    def _best(self, strategies: Sequence[Strategy]) -> Candidate | None:
        saving = strategies[-1]
        stored = str(saving.storage)
        if stored in self._too_large:
            return None
        sizes = self._sizes(saving)
        # The highest rank often fits; where what costs less did not fit at all, often not even the lowest does.
        first = 0 if saving.goal == "experts" or saving.slowness or any(saving.costs) else len(sizes) - 1
        report = self.predictor.quick(self._run(saving, sizes[first]))
        if not _holds_frozen_weights(report):
            self._too_large.add(stored)
            return None
        last, reports = last_that_fits(
            len(sizes),
            lambda number: self.predictor.quick(self._run(saving, sizes[number])),
            self.left,
            len(sizes) - 1 - first if saving.goal == "lora" else 0,
            sizes=[size.amount for size in sizes],
            known={first: report},
        )
        if last < 0:
            return None
        by_storage = [list(group) for _, group in groupby(strategies, key=lambda strategy: strategy.storage)]
        number, report = self._first_that_fits([group[-1] for group in by_storage], sizes[last], reports[last])
        of_storage = by_storage[number]
        number, report = self._first_that_fits(of_storage, sizes[last], report)
        return self._candidate(of_storage[number], sizes[last:], report)

    def _first_that_fits(
        self, strategies: Sequence[Strategy], size: Size, of_last: MemoryReport
    ) -> tuple[int, MemoryReport]:
        """Return the number of the first strategy whose run of a size fits, and its report. Later ones save more
        memory; `of_last` is the report of the last, which fits."""
        number, report = len(strategies) - 1, of_last
        while number:
            earlier = self.predictor.quick(self._run(strategies[number - 1], size))
            if self.left(earlier) < 0:
                break
            number, report = number - 1, earlier
        return number, report

    def smallest(self, strategy: Strategy) -> RunConfig:
        """Return the smallest run of a strategy: one expert of one layer on each rank that stores experts of its own,
        LoRA of the lowest rank, or all routers."""
        return self._run(strategy, self._sizes(strategy)[0])

    def reported(self, found: Candidate) -> Candidate:
        """Return a candidate with its report for all routings, and, but for time and what the allocator reserves, that
        of the next larger one."""
        larger = found.next_larger
        if larger is not None:
            larger = replace(larger, report=self.predictor.report(larger.config, simulated=False, timed=False))
        config = found.config
        if (stages := self.predictor.divided(self.predictor.resolve(config)).config.parallel.stages) != "auto":
            config = changed(config, {"parallel.stages": stages})
        return replace(
            found, config=config, report=self.predictor.report(config, simulated=self.simulated), next_larger=larger
        )

    def _candidate(self, strategy: Strategy, sizes: Sequence[Size], report: MemoryReport) -> Candidate:
        """Return the candidate that trains the first of the sizes, with the largest micro-batch in `ROWS` that fits,
        and `train.accumulate` divided by it (at least 1, and one for each stage of a pipeline)."""
        config = self._run(strategy, sizes[0])

        def with_rows(rows: int) -> RunConfig:
            accumulate = max(config.parallel.pp, config.train.accumulate // rows)
            return changed(config, {"train.micro_batch": rows, "train.accumulate": accumulate})

        # Layers with a state take as long for each document whatever the size, so of such models only one row is tried.
        has_state = layers_with_state(self._model.plain)
        first = ROWS.index(config.train.micro_batch)
        all_rows = ROWS[first : first + 1] if has_state else ROWS[first:]
        configs = [config, *map(with_rows, all_rows[1:])]
        last, reports = last_that_fits(
            len(configs),
            lambda number: self.predictor.quick(configs[number]),
            self.left,
            sizes=all_rows,
            known={0: report},
        )
        larger = None
        if len(sizes) > 1:
            larger = NextLarger(sizes[1].words, self._run(strategy, sizes[1]))
        elif last + 1 < len(configs):
            larger = NextLarger(f"micro-batch {all_rows[last + 1]}", configs[last + 1])
        return Candidate(strategy, configs[last], reports[last], sizes[0].amount, larger)

    def _run(self, strategy: Strategy, size: Size) -> RunConfig:
        return changed(self.start, {**strategy.settings, **size.settings})

    def _sizes(self, strategy: Strategy) -> list[Size]:
        """Return how much a strategy's runs may train, by rising memory."""
        layers = [layer.index for layer in self.structure.moe_layers]
        if strategy.goal == "router":
            return [Size(0, "all routers", {"adapt.router": "all"})]
        if strategy.goal == "lora":
            targets = ["attention", "experts" if layers else "dense_mlp"]
            return [
                Size(
                    rank,
                    f"rank {rank}",
                    {"adapt.lora.rank": rank, "adapt.lora.alpha": 2 * rank, "adapt.lora.targets": targets},
                )
                for rank in RANKS
            ]
        # Equally many experts train in each of the first layers. Of one number of experts in all, few in each of many
        # layers need least: their gradients are not alive together. So a layer more comes before an expert more.
        most = min(layer.shape.num_experts for layer in self.structure.moe_layers)
        sizes: list[Size] = []
        step = strategy.settings.get("parallel.ep", 1)  # so that all ranks train equally many and need equal memory
        for each in range(step, most + 1, step):
            fewest = sizes[-1].amount // each + 1 if sizes else 1
            for count in range(fewest, len(layers) + 1):
                chosen = {"adapt.experts.layers": ranges(layers[:count]), "adapt.experts.ids": ranges(range(each))}
                words = f"{counted(count, 'layer')} × {counted(each, 'expert')}"
                sizes.append(Size(count * each, words, chosen))
        return sizes


def _holds_frozen_weights(report: MemoryReport) -> bool:
    assert report.headroom_bytes is not None
    fullest = report.fullest
    capacity = report.headroom_bytes + report.required - fullest.outside_allocator
    return capacity >= fullest.parts.frozen_weights
