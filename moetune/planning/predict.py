"""`moetune predict`: settle `auto`, predict the run, say what would make it fit."""

from dataclasses import replace
from itertools import islice

from moetune.memory.allocator import Allocator
from moetune.memory.assumed_routing import UNKNOWN, AssumedRouting
from moetune.memory.report import MemoryReport
from moetune.models.catalog.gpus import Gpu
from moetune.planning.predictor import Predictor
from moetune.planning.savings import fitting
from moetune.planning.settle import settled
from moetune.run.resolve import AnyRun, resolve


def predict(
    run: AnyRun,
    *,
    gpu: str | Gpu | None = None,
    routing: AssumedRouting = UNKNOWN,
    allocator: Allocator | None = None,
    advise: bool = True,
) -> MemoryReport:
    """Predict the peak memory of a run and the time of a step, by a trace. Needs no weights, no data and no GPU.

    Args:
        run: the path of a run file, a configuration, or a resolved run. It is predicted for CUDA.
        gpu: a GPU's name, a size such as `44GiB`, or a catalog entry. None: `hardware.gpu`; if that is not set either,
            the report has no verdict, and memory outside the allocator is that of an L40S.
        routing: assumed number of tokens that each expert receives; what it does not know widens the report's `span`.
        allocator: the configuration of torch's allocator that is simulated. None: what the environment variables set,
            else `expandable`, as in `moetune train`.
        advise: if the run does not fit, add up to three changes of the run file with which it fits.

    Raises:
        UserError: as `resolve`; the run cannot be trained or predicted; the GPU is unknown; or a DeepSpeed run is to be
            traced and DeepSpeed is not installed.
        NotTraceable: the model's own code reads values of tensors, which fake tensors do not have.
    """
    run = resolve(run, "cuda")
    if gpu or run.config.hardware.names:
        run = settled(run, gpu, routing)
    predictor = Predictor(gpu, routing, allocator=allocator)
    report = predictor.report(run)
    if not advise or report.card_verdict in (None, "yes"):
        return report
    if run.config.parallel.ranks > 1:
        note = "another layout may fit: compare layouts with `moetune compare` (docs/guides/parallel.md)"
        return replace(report, notes=(*report.notes, note))
    changes = tuple(remedy.change_of(report) for remedy in islice(fitting(run.config, report, predictor.quick), 3))
    if changes:
        return replace(report, changes=changes)
    return replace(report, notes=(*report.notes, "no change of the run file is known that makes it fit"))
