"""`Predictor`: predictions for many runs of one model, kept on disk; `parallel.stages: auto` cut by them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from moetune.memory.allocator import Allocator
from moetune.memory.assumed_routing import UNKNOWN, AssumedRouting
from moetune.memory.commands.trl import predict_trl
from moetune.memory.predict import cards_of, predict_memory
from moetune.memory.report import MemoryReport, RankMemory
from moetune.models.catalog.gpus import Gpu
from moetune.run.dtypes import DeviceType
from moetune.run.resolve import AnyRun, ResolvedRun, resolve
from moetune.run.stages import least_stages
from moetune.training.trl import InTrl


@dataclass
class Predictor:
    """Predicts the memory of several runs of one model, each by a trace, which takes about a second.

    Attributes:
        gpu: the GPU to predict for: a name, a memory size such as `44GiB`, or a `Gpu`; None for the `hardware.gpu` of
            each run.
        routing: how many tokens each expert is assumed to receive.
        end: the single routing for which `quick` predicts, in half the time of several. `high`: the most uneven routing
            that is possible; of the report, `least_headroom` is right. `expected`: the assumed routing;
            `headroom_bytes` is right. None: all possible routings.
        device_type: the device that the runs are resolved for, `cuda` or `cpu`.
        trainer: the trainer of TRL to predict for; None for moetune's own.
        allocator: the configuration of torch's allocator that `report` simulates; None as in `predict_memory`.
    """

    gpu: str | Gpu | None = None
    routing: AssumedRouting = UNKNOWN
    end: Literal["high", "expected"] | None = None
    device_type: DeviceType = "cuda"
    trainer: InTrl | None = None
    allocator: Allocator | None = None
    _like: ResolvedRun | None = None
    _stages: tuple[range, ...] = ()

    def resolve(self, run: AnyRun) -> ResolvedRun:
        """Resolve a run, reusing the model of the last call if it is the same; `UserError` if settings are wrong."""
        self._like = resolve(run, self.device_type, like=self._like)
        return self._like

    def divided(self, run: ResolvedRun) -> ResolvedRun:
        """Return a run with stages in place of `parallel.stages: auto`, where that is one: those of which the fullest
        rank needs the least of its GPU.

        Each prediction says what each layer takes, and so which stages would be best if every layer took as much on any
        rank. Those are predicted next, until stages come again. The first stages are those that this predictor found
        last; at first equal numbers of layers, so they are the same wherever they are asked for.
        """
        pp = run.config.parallel.pp
        if pp == 1 or run.config.parallel.stages != "auto":
            return run
        predictor = replace(self, routing=UNKNOWN, end="high", trainer=None)
        memories = [card.memory.value for card in cards_of(run, self.gpu)]
        stages = run.stages
        if len(self._stages) == len(stages) and self._stages[-1].stop == stages[-1].stop:
            stages = self._stages
        fullest: dict[tuple[range, ...], float] = {}
        while stages not in fullest:
            cut = run.settled_as(None).cut_into(stages)
            ranks = predictor.quick(cut).ranks
            ranks = ranks[:: len(ranks) // pp]  # one of each stage
            fullest[stages] = max(rank.needed / memories[pp % len(memories)] for pp, rank in enumerate(ranks))
            stages = _if_layers_took_the_same_anywhere(cut, ranks, memories)
        self._stages = min(fullest, key=lambda stages: (fullest[stages], [stage.stop for stage in stages]))
        return run.cut_into(self._stages)

    def quick(self, run: AnyRun) -> MemoryReport:
        """Predict the memory of a run for the routing that `end` says, without simulating the allocator; `UserError` if
        it cannot be resolved or predicted. `auto` counts as what takes least."""
        routing = self.routing
        if self.end is not None:
            only = routing.highest if self.end == "high" else None
            routing = only or replace(routing, lowest=None, highest=None)
        return self._predict(run, routing, simulated=False, timed=False)

    def report(self, run: AnyRun, *, simulated: bool = True, timed: bool = True) -> MemoryReport:
        """Predict for all routings that are possible, whatever `end` says; `simulated` and `timed` as in
        `predict_memory`."""
        return self._predict(run, self.routing, simulated=simulated, timed=timed)

    def _predict(self, run: AnyRun, routing: AssumedRouting, *, simulated: bool, timed: bool) -> MemoryReport:
        run = self.divided(self.resolve(run))
        if self.trainer is not None:
            kind, more = self.trainer.trainer, self.trainer.more
            return predict_trl(run, kind, more, gpu=self.gpu, routing=routing, allocator=self.allocator, cached=True)
        return predict_memory(
            run,
            gpu=self.gpu,
            routing=routing,
            allocator=self.allocator,
            simulated=simulated,
            timed=timed,
            cached_as="train",
        )


def _if_layers_took_the_same_anywhere(
    run: ResolvedRun, ranks: Sequence[RankMemory], memories: Sequence[int]
) -> tuple[range, ...]:
    """Return the best stages by a prediction. What a rank needs beside its layers, and its GPU's memory, is divided
    over its stages."""
    stages_of_each = len(run.stages) // len(ranks)
    layers, beside = dict[int, int](), list[tuple[int, int]]()
    for pp, rank in enumerate(ranks):
        layers |= zip(run.held_layers(pp), rank.layers, strict=True)
        others, memory = rank.needed - sum(rank.layers), memories[pp % len(memories)]
        beside.append((others // stages_of_each, memory // stages_of_each))
    return least_stages([layers[layer] for layer in sorted(layers)], beside * stages_of_each)
