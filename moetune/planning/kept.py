"""`kept`: a cache on disk of traced reports, so that a plan that is made again, or has the same runs, is quick."""

from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version

from moetune.adapt.guard import as_known
from moetune.cache import file_of, read_cached, write_cached
from moetune.memory.assumed_routing import AssumedRouting
from moetune.memory.predict import allocator_here
from moetune.memory.report import MemoryReport
from moetune.models.catalog.gpus import Gpu, find_gpu
from moetune.run.resolve import ResolvedRun
from moetune.training.trl import InTrl


def kept(
    run: ResolvedRun,
    gpu: str | Gpu | None,
    routing: AssumedRouting,
    trace: Callable[[], MemoryReport],
    trainer: InTrl | None = None,
    *,
    simulated: bool = True,
) -> MemoryReport:
    """Read the report of a run on a GPU from disk; if it is not there, call `trace` for it, and write it.

    Args:
        gpu: a GPU's name, a size such as `44GiB`, or a catalog entry; None for `hardware.gpu`.
        routing: how many tokens each expert is assumed to receive.
        trace: makes the report.
        trainer: the trainer of TRL that is predicted; None for moetune's own.
        simulated: as in `predict`. A report with a simulated allocator also answers for one without.

    Raises:
        UserError: `$MOETUNE_CACHE` cannot be a path, or there is no home folder; or what `trace` raises.
    """
    name = gpu or run.config.hardware.gpu
    card = name if isinstance(name, Gpu) else find_gpu(name or "l40s")
    known = as_known(run, None if name is None else card)  # as `predict` does
    about = {
        "run": known.config.model_dump(mode="json", exclude={"output"}),
        "settings": [run.model.settings.to_dict(), run.model.source.config.to_dict()],
        "published": run.model.source.quantization.method,
        "gpu": [gpu if isinstance(gpu, str) else None, asdict(card)],
        "routing": asdict(routing),
        "allocator": allocator_here("expandable"),
        "trainer": None if trainer is None else [trainer.trainer, trainer.arguments, version("trl")],
    }
    files = [file_of({**about, "simulated": is_simulated}) for is_simulated in dict.fromkeys((True, simulated))]
    report = next((report for file in files if (report := read_cached(file, MemoryReport)) is not None), None)
    if report is None:
        report = trace()
        write_cached(files[-1], MemoryReport, report)
    return report
