"""How much fits, by one way: the most that trains, then the most tokens at once.

Kinds of runs are recorded in seconds and evaluated in milliseconds (closed_form/), so as few as possible are looked at.
Arithmetic on the stored weights bounds from below what a run needs: what cannot fit by it is not recorded. One record
serves every number of layers (closed_form/depth.py). In the number of trained experts memory is a straight line, for
any number of them a layer, that begins the higher the more there are of a layer: a layer's gradients are added up
together. So what one line says bounds all runs that have more experts a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from moetune.config.schema import OptimizerConfig, RunConfig
from moetune.errors import counted
from moetune.memory.changes import changed
from moetune.memory.report import MemoryReport
from moetune.models.catalog.gpus import find_gpu
from moetune.models.selection import ranges
from moetune.models.structure import ModelStructure
from moetune.planning.predictor import Predictor
from moetune.planning.solve import last_that_fits
from moetune.planning.strategies import Strategy
from moetune.run.resolve import resolve_model
from moetune.training.optim.saved import state_bytes

RANKS = (4, 8, 16, 32, 64)
ROWS = (1, 2, 4, 8, 16, 32, 64)
_UNSURE = 100 << 20
"""Bytes that a closed form may have more than a trace: what is reserved is rounded up to a page of each pool."""


@dataclass(frozen=True)
class NextLarger:
    """A run a notch larger than what fits, and that notch in words."""

    what: str
    config: RunConfig
    report: MemoryReport


@dataclass(frozen=True)
class Solution:
    """The largest run of one way, and the one a notch larger, which does not fit; None if there is none."""

    way: Strategy
    config: RunConfig
    report: MemoryReport
    amount: int
    beyond: NextLarger | None


class Search:
    """A search for one model on one card.

    Args:
        start: the run file that ways are put into: model, card, length.
        usable: bytes of the card.
        context: bytes that a process takes of it whatever it does.
    """

    def __init__(
        self, start: RunConfig, structure: ModelStructure, needs: Predictor, usable: int, context: int = 0
    ) -> None:
        self.start, self.structure, self.needs, self.usable, self.context = start, structure, needs, usable, context
        self.margin = 0  # bytes that the trace of what was found has more than the closed form
        self.layers = [layer.index for layer in structure.moe_layers]
        self.experts = min((layer.shape.num_experts for layer in structure.moe_layers), default=0)

    @classmethod
    def of(cls, start: RunConfig) -> Search:
        """For the model and the card of a run file."""
        assert start.hardware.gpu is not None
        card = find_gpu(start.hardware.gpu)
        return cls(start, resolve_model(start.model).structure, Predictor(), card.memory.value, card.context.value)

    def may_fit(self, way: Strategy) -> bool:
        """Whether the least that a way could train fits by arithmetic."""
        return self.bound(way, 1 if way.goal == "experts" else 0) <= self.usable

    def traced(self, found: Solution) -> Solution | None:
        """The same, traced, and the notch more too where that could fit. A trace may have a little more than the closed
        form, or less: then the most that fits with that; None if there is nothing."""
        self.margin = 0
        sure: Solution | None = None
        now: Solution | None = found
        for _ in range(4):
            if now is None:
                break
            report = self.needs.traced(now.config)
            if report.fits:
                sure, over = replace(now, report=report), now.beyond
                if over is None or self._left(over.report) < -_UNSURE:
                    break
                more = self.needs.traced(over.config)
                if not more.fits:
                    return replace(sure, beyond=replace(over, report=more))
                self.margin = more.required - over.report.required
            elif sure is not None:
                break
            else:
                self.margin += max(report.required - now.report.required, 1)
            now = self.largest(found.way)
        return sure

    def largest(self, way: Strategy) -> Solution | None:
        """The most that a way trains; None if nothing of it fits."""
        if not self.may_fit(way):
            return None
        match way.goal:
            case "experts":
                found = self._most_experts(way)
            case "lora":
                found = self._highest_rank(way)
            case "router":
                found = self._at(way, {"adapt.router": "all"}, 0)
        return None if found is None else self._most_rows(found)

    def smallest(self, way: Strategy) -> RunConfig:
        """The least that a way could train."""
        match way.goal:
            case "experts":
                return self.config(way, self._of_experts(1, 1))
            case "lora":
                return self.config(way, self._of_rank(RANKS[0]))
        return self.config(way, {"adapt.router": "all"})

    def config(self, way: Strategy, settings: dict[str, Any]) -> RunConfig:
        return changed(self.start, {**way.settings, **settings})

    def _at(self, way: Strategy, settings: dict[str, Any], amount: int) -> Solution | None:
        config = self.config(way, settings)
        report = self.needs.of(config)
        return Solution(way, config, report, amount, None) if self._left(report) >= 0 else None

    def _left(self, report: MemoryReport) -> int:
        assert report.headroom_bytes is not None
        return report.headroom_bytes - self.margin

    # --- Experts ----------------------------------------------------------------------------------------------

    def grid(self) -> Iterator[tuple[int, int]]:
        """Every number of layers, and of experts in each."""
        return ((layers, each) for layers in range(1, len(self.layers) + 1) for each in range(1, self.experts + 1))

    def _of_experts(self, layers: int, each: int) -> dict[str, Any]:
        return {
            "adapt.experts.layers": ranges(self.layers[:layers]),
            "adapt.experts.ids": ranges(range(each)),
        }

    def _most_experts(self, way: Strategy) -> Solution | None:
        """The most layers × experts; of equal ones that with fewest experts a layer."""
        reports: dict[tuple[int, int], MemoryReport] = {}

        def report(layers: int, each: int) -> MemoryReport:
            if (layers, each) not in reports:
                reports[layers, each] = self.needs.of(self.config(way, self._of_experts(layers, each)))
            return reports[layers, each]

        def headroom(layers: int, each: int) -> int:
            return self._left(report(layers, each))

        depth = len(self.layers)
        most = sum(self.bound(way, count) <= self.usable for count in range(1, depth * self.experts + 1))
        first = max(1, -(-most // depth))
        on_line = most  # what a line leaves room for, for as many experts a layer as it has, and more
        best: tuple[int, int] | None = None
        for each in (*range(first, self.experts + 1), *range(first - 1, 0, -1)):
            amount = 0 if best is None else best[0] * best[1]
            end = min(depth, (on_line if each >= first else most) // each)
            is_tie = best is not None and each < best[1] and amount % each == 0
            if end * each < amount + (not is_tie):
                continue
            layers = 1 + last_that_fits(end, lambda number: headroom(number + 1, each), max(3, depth // 3))  # noqa: B023
            if layers and (layers * each > amount or (is_tie and layers * each == amount)):
                best = layers, each
            if not layers and best is None and headroom(1, 1) < 0:
                return None
            if each >= first:
                on_line = min(on_line, self._end_of_line(reports, each, on_line) if layers else each - 1)
        if best is None:
            return None
        layers, each = best
        further = (layers + 1, each) if layers < depth else (-(-(layers * each + 1) // (each + 1)), each + 1)
        beyond = None
        if further[0] <= depth and further[1] <= self.experts:
            config = self.config(way, self._of_experts(*further))
            beyond = NextLarger(
                f"{counted(further[0], 'layer')} × {counted(further[1], 'expert')}", config, report(*further)
            )
        return Solution(way, self.config(way, self._of_experts(*best)), reports[best], layers * each, beyond)

    def _end_of_line(self, reports: dict[tuple[int, int], MemoryReport], each: int, most: int) -> int:
        """The most experts that a straight line through the two deepest runs with so many a layer leaves room for."""
        points = sorted((layers * each, one.required) for (layers, e), one in reports.items() if e == each)
        if len(points) < 2:
            return most
        (one, low), (other, high) = points[-2:]
        slope = (high - low) / (other - one)
        return one + int((self.usable - low) / slope) if slope > 0 else most

    # --- LoRA, and rows ---------------------------------------------------------------------------------------

    def _of_rank(self, rank: int) -> dict[str, Any]:
        targets = ["attention", "experts" if self.layers else "dense_mlp"]
        return {"adapt.lora.rank": rank, "adapt.lora.alpha": 2 * rank, "adapt.lora.targets": targets}

    def _highest_rank(self, way: Strategy) -> Solution | None:
        reports: dict[int, MemoryReport] = {}

        def headroom(number: int) -> int:
            reports[number] = self.needs.of(self.config(way, self._of_rank(RANKS[number])))
            return self._left(reports[number])

        last = last_that_fits(len(RANKS), headroom, len(RANKS) - 1)
        if last < 0:
            return None
        configs = [self.config(way, self._of_rank(rank)) for rank in RANKS[last : last + 2]]
        beyond = NextLarger(f"rank {RANKS[last + 1]}", configs[1], reports[last + 1]) if configs[1:] else None
        return Solution(way, configs[0], reports[last], RANKS[last], beyond)

    def _most_rows(self, found: Solution) -> Solution:
        """The same with as many rows a micro-batch as fit, and as many rows a step."""
        configs: dict[int, RunConfig] = {0: found.config}
        reports: dict[int, MemoryReport] = {0: found.report}

        def headroom(number: int) -> int:
            steps = max(1, found.config.train.accumulate // ROWS[number])
            configs[number] = changed(found.config, {"train.micro_batch": ROWS[number], "train.accumulate": steps})
            reports[number] = self.needs.of(configs[number])
            return self._left(reports[number])

        # where experts train there is seldom room for many more
        start = 1 if found.way.goal == "experts" else len(ROWS) - 1
        last = last_that_fits(len(ROWS), headroom, start, self._left(found.report))
        beyond = found.beyond
        if beyond is None and last + 1 < len(ROWS):
            beyond = NextLarger(f"micro-batch {ROWS[last + 1]}", configs[last + 1], reports[last + 1])
        return Solution(found.way, configs[last], reports[last], found.amount, beyond)

    def is_all(self, found: Solution) -> bool:
        """Whether nothing larger is looked for, whatever the way."""
        most = {"experts": len(self.layers) * self.experts, "lora": RANKS[-1], "router": 0}[found.way.goal]
        return found.amount >= most and found.config.train.micro_batch >= ROWS[-1]

    # --- Arithmetic -------------------------------------------------------------------------------------------

    def bound(self, way: Strategy, experts: int) -> int:
        """Bytes that a run needs at least, by arithmetic alone, with so many experts trained (memory/arithmetic.py)."""
        config = self.config(way, self._of_experts(1, 1) if self.layers else {"adapt.also": ["norm"]})
        per_weight = {"nf4": 0.5, "mxfp4": 0.5, "int8": 1.0, "bf16": 2.0, "fp32": 4.0}[config.model.base]
        stored = per_weight * sum(part.numel for part in self.structure.parameters)
        if config.model.experts_on == "host":
            stored -= per_weight * sum(part.numel for part in self.structure.parameters_of("experts"))
        each = 0.0
        if experts:
            size = self.structure.moe_layers[0].shape.parameters_per_expert
            optimizer = config.optimizer
            assert isinstance(optimizer, OptimizerConfig)
            each = size * (2 - per_weight)
            if not optimizer.offload:
                width = 4 if optimizer.master_weights == "fp32" else 2
                each += state_bytes(optimizer, (size,), width) + 4 * size * (width == 4)
                each += 0 if optimizer.fused_backward else 2 * size
        return self.context + int(stored + experts * each) // config.parallel.ranks
