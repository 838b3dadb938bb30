"""Scoring for real, with random weights and tokens, for comparing with what is predicted."""

from torch import Tensor

from moetune.adapt.build import build
from moetune.experts.context import ReadCounts
from moetune.memory.commands.forward import follow
from moetune.memory.trace import Trace
from moetune.memory.trace.watched import Watched
from moetune.routing.memory import Scoring
from moetune.run.resolve import ResolvedRun


def measure_score(run: ResolvedRun, sources: int = 1) -> tuple[Trace, list[list[int]]]:
    """What was followed on a CPU, and the rows of each expert, call by call."""
    watched = Watched(build(run.with_random_weights(), "cpu"))
    calls: list[list[int]] = []

    def recorded(layer: int, ids: Tensor, num_experts: int, read: ReadCounts) -> list[int]:
        calls.append(read())
        return calls[-1]

    with watched.adapted.expert_context.hooks.using(count_rows=recorded):
        log = follow(watched, watched.tracker(), Scoring(sources))
    return Trace.of(log, watched.adapted.ranks.axis_of), calls
