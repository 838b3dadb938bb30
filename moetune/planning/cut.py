"""`parallel.stages: auto`: a pipeline cut where the fullest rank needs least, by predictions."""

from collections.abc import Callable, Sequence

from moetune.memory.report import MemoryReport, RankMemory
from moetune.run.resolve import ResolvedRun
from moetune.run.stages import least_stages


def best_stages(
    run: ResolvedRun,
    predict: Callable[[ResolvedRun], MemoryReport],
    memories: Sequence[int],
    before: tuple[range, ...] = (),
) -> tuple[range, ...]:
    """Return the stages of a pipeline of which the fullest rank needs the least of its GPU.

    Each prediction says what each layer takes, and so which stages would be best if every layer took as much on any
    rank. Those are predicted next, until stages come again.

    Args:
        predict: predicts a run whose stages are given.
        memories: bytes of GPU memory, one for all ranks or one for each rank of the axis `pp`.
        before: the stages to begin with, if they are of as many layers and ranks; else equal numbers of layers.
    """
    stages = run.stages
    if len(before) == len(stages) and before[-1].stop == stages[-1].stop:
        stages = before
    fullest: dict[tuple[range, ...], float] = {}
    while stages not in fullest:
        cut = run.settled_as(None).cut_into(stages)
        ranks = _one_of_each_stage(predict(cut), run.config.parallel.pp)
        fullest[stages] = max(rank.needed / memories[pp % len(memories)] for pp, rank in enumerate(ranks))
        stages = _if_layers_took_the_same_anywhere(cut, ranks, memories)
    return min(fullest, key=lambda stages: (fullest[stages], [stage.stop for stage in stages]))


def _one_of_each_stage(report: MemoryReport, pp: int) -> Sequence[RankMemory]:
    return report.ranks[:: len(report.ranks) // pp]


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
