"""`remedies`: savings with which a run that ran out of memory would have fitted."""

from dataclasses import replace

from moetune.memory.assumed_routing import BALANCED
from moetune.memory.host import this_machine
from moetune.models.catalog.gpus import Figure, Gpu
from moetune.planning.fit import headroom
from moetune.planning.predictor import Predictor
from moetune.planning.savings import Remedy, fitting
from moetune.run.resolve import ResolvedRun


def remedies(run: ResolvedRun, card: Gpu, lacking: int) -> list[Remedy]:
    """Return changes of the run file, each enough by itself, with which a run that ran out of memory would have fitted,
    the mildest first; if there is none, one combination of changes.

    The run's own prediction less `lacking` is taken to be the memory that there was, because other programs may use
    part of the GPU, and a run may need more than is predicted; this accounts for the actual routing, too. What a change
    moves to host memory must fit there.

    Args:
        card: the GPU on which the run ran out of memory.
        lacking: bytes by which the memory was too small for the run.

    Raises:
        UserError: the run cannot be predicted.
    """
    predictor = Predictor(card, BALANCED, device_type=run.device_type)
    available = Figure(predictor.of(run.config).required - lacking, "what there was")
    predictor = replace(predictor, gpu=replace(card, memory=available))
    report, host = predictor.of(run.config), this_machine()

    def has_room(remedy: Remedy) -> bool:
        moved = (remedy.report.fullest.host_bytes - report.fullest.host_bytes) * run.config.parallel.ranks
        return host is None or moved <= host.value

    return [*filter(has_room, fitting(run.config, report, predictor.of, headroom))]
