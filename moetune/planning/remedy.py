"""What would have fitted where a run has run out of memory: largest values of single settings, or changes together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.memory.changes import changed, fitting
from moetune.memory.report import MemoryReport
from moetune.models.catalog.gpus import Figure, Gpu
from moetune.planning.doctor import host_memory
from moetune.planning.predictor import Predictor
from moetune.planning.solve import solve
from moetune.run.resolve import ResolvedRun

KEYS = (
    "train.micro_batch", "train.eval_micro_batch", "train.sequence_length", "adapt.lora.rank", "adapt.experts.layers",
)  # fmt: skip


@dataclass(frozen=True)
class Remedy:
    """Settings as `--set` takes them, and what a run needs with them."""

    flags: tuple[str, ...]
    required: int


def remedies(run: ResolvedRun, card: Gpu, lacking: int) -> list[Remedy]:
    """Settings with which a run would have needed less by what was lacking: single changes, the mildest first, or
    several where none is enough alone; then the largest value of each size.

    What there really was may be less than the card has, as other programs take of it, and a run may need more than is
    predicted. So what fits is taken from what is predicted of the run itself, less what was lacking. What would wait in
    host memory must find room there, too.

    Args:
        lacking: bytes.

    Raises:
        UserError: it cannot be predicted.
    """
    needed = Predictor(card, device_type=run.device_type).of(run.config).required
    there = replace(card, memory=Figure(needed - lacking, "what there was"))
    needs = Predictor(there, device_type=run.device_type)
    report = needs.of(run.config)
    solved = list(_solved(run.config, needs))
    keys = {flag.partition("=")[0] for one in solved for flag in one.flags}
    of = _within_host_memory(report, needs)
    others = (one for one in fitting(run.config, report, of) if not keys & one.settings.keys())
    return [*(Remedy(one.flags, one.report.required) for one in islice(others, 3)), *solved]


def _within_host_memory(of_run: MemoryReport, needs: Predictor) -> Callable[[RunConfig], MemoryReport]:
    """`needs.of`, which refuses what takes more host memory, beside the run itself, than this machine has left."""
    room = host_memory()

    def evaluate(config: RunConfig) -> MemoryReport:
        report = needs.of(config)
        more = (report.fullest.host_bytes - of_run.fullest.host_bytes) * config.parallel.ranks
        if room is not None and more > room:
            raise UserError(f"{more} bytes of host memory are wanted, and {room} are available")
        return report

    return evaluate


def _solved(config: RunConfig, needs: Predictor) -> Iterator[Remedy]:
    for key in KEYS:
        try:
            solved = solve(config, key, needs)
        except UserError:  # the run has no such setting
            continue
        if solved.at is None:
            continue
        if key != "train.micro_batch":
            yield Remedy(solved.settings, solved.at.required)
        else:
            yield _same_step(config, solved.value, needs)


def _same_step(config: RunConfig, most: int, needs: Predictor) -> Remedy:
    """As many rows a micro-batch as divide those of a step; the same step, unless gradients are freed as they come."""
    train = config.train
    rows = train.micro_batch * train.accumulate
    micro_batch = max(size for size in range(1, most + 1) if rows % size == 0)
    settings = {"train.micro_batch": micro_batch, "train.accumulate": rows // micro_batch}
    if any(optimizer.fused_backward for optimizer in config.optimizers.values()):
        settings = {"train.micro_batch": most}
    report = needs.of(changed(config, settings))
    return Remedy(tuple(f"{key}={value}" for key, value in settings.items()), report.required)
