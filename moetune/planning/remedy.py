"""`remedies`: settings with which a run that ran out of memory would have fitted, from changes.py and solve.py.

changes.py lists the changes that save memory and chooses their order; solve.py finds the largest value of one
setting that fits. This module applies both to the memory that such a run had.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.memory.assumed_routing import BALANCED
from moetune.memory.host import this_machine
from moetune.models.catalog.gpus import Figure, Gpu
from moetune.planning.changes import Remedy, changed, fitting
from moetune.planning.fit import headroom
from moetune.planning.predictor import Predictor
from moetune.planning.solve import solve
from moetune.run.resolve import ResolvedRun

KEYS = (
    "train.micro_batch", "train.eval_micro_batch", "train.sequence_length", "adapt.lora.rank", "adapt.experts.layers",
)  # fmt: skip


def remedies(run: ResolvedRun, card: Gpu, lacking: int) -> list[Remedy]:
    """Return changes of the run file, each enough by itself, with which a run that ran out of memory would have fitted.

    First up to three savings that changes.py finds, the mildest first; then the largest value that fits of each
    setting in `KEYS`. The run's own prediction less `lacking` is taken to be the memory that there was, because other
    programs may use part of the GPU, and a run may need more than is predicted; this accounts for the actual routing,
    too. What a change moves to host memory must fit there.

    Args:
        card: the GPU on which the run ran out of memory.
        lacking: bytes by which the memory was too small for the run.

    Raises:
        UserError: the run cannot be predicted.
    """
    predictor = Predictor(card, BALANCED, device_type=run.device_type)
    available = Figure(predictor.of(run.config).required - lacking, "what there was")
    predictor = replace(predictor, gpu=replace(card, memory=available))
    largest = list(_largest(run.config, predictor))
    keys = {key for one in largest for key in one.settings}
    report, room = predictor.of(run.config), this_machine()

    def has_room(one: Remedy) -> bool:
        moved = (one.report.fullest.host_bytes - report.fullest.host_bytes) * run.config.parallel.ranks
        return room is None or moved <= room.value

    found = filter(has_room, fitting(run.config, report, predictor.of, headroom))
    return [*islice((one for one in found if not keys & one.settings.keys()), 3), *largest]


def _largest(config: RunConfig, predictor: Predictor) -> Iterator[Remedy]:
    """Yield a remedy for each setting in `KEYS`: the largest value with which the run fits.

    Settings that the run does not have, or of which no value fits, are left out. The remedy for `train.micro_batch`
    changes `train.accumulate` too (`_same_step`).
    """
    for key in KEYS:
        try:
            solved = solve(config, key, predictor, tight=True)
        except UserError:  # the run has no such setting
            continue
        if solved.report is None:
            continue
        if key == "train.micro_batch":
            settings = _same_step(config, solved.value)
            yield Remedy(settings, (), predictor.of(changed(config, settings)))
        else:
            yield Remedy({key: solved.written}, (), solved.report)


def _same_step(config: RunConfig, most: int) -> dict[str, object]:
    """Return run-file key -> value for micro-batches of at most `most` rows, without changing the rows of a step.

    The micro-batch is the largest that divides a step's rows, and `train.accumulate` makes up for it. With
    `fused_backward`, which cannot accumulate gradients, it has `most` rows, and so has the step.
    """
    if any(optimizer.fused_backward for optimizer in config.optimizers.values()):
        return {"train.micro_batch": most}
    rows = config.train.micro_batch * config.train.accumulate
    micro_batch = max(size for size in range(1, most + 1) if rows % size == 0)
    return {"train.micro_batch": micro_batch, "train.accumulate": rows // micro_batch}
