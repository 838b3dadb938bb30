"""`kept`: a cache of traced reports on disk, so that a plan made again, or one with the same runs, is quick."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version

from pydantic import TypeAdapter

from moetune.memory.assumed_routing import AssumedRouting
from moetune.memory.closed_form import store
from moetune.memory.predict import allocator_here
from moetune.memory.report import MemoryReport
from moetune.memory.time.roofline import duration
from moetune.models.catalog.gpus import Gpu, find_gpu
from moetune.run.resolve import ResolvedRun
from moetune.training.trl import InTrl


def kept(
    run: ResolvedRun,
    gpu: str | Gpu | None,
    routing: AssumedRouting,
    trace: Callable[[], MemoryReport],
    trainer: InTrl | None = None,
) -> MemoryReport:
    """Read the traced report of a run on a GPU from disk; if it is not there, call `trace` for it, and write it.

    The key is all that the report depends on: the run, `gpu`, `routing`, the allocator's configuration, and `trainer`,
    the trainer of TRL that was traced (None: moetune's own). In a report from disk the time of a step is estimated anew
    from the work that was counted, by the speeds that are known now.

    Args:
        gpu: a GPU's name, a size such as `44GiB`, or a catalog entry; None for `hardware.gpu`.
        trace: makes the report.
    """
    name = gpu or run.config.hardware.gpu or "l40s"
    card = name if isinstance(name, Gpu) else find_gpu(name)
    key = store.key_of(
        {
            "report": run.config.model_dump(mode="json", exclude={"output"}),
            "settings": [run.model.settings.to_dict(), run.model.source.config.to_dict()],
            "published": run.model.source.quantization.method,
            "gpu": [gpu if isinstance(gpu, str) else None, asdict(card)],
            "routing": asdict(routing),
            "allocator": allocator_here("expandable"),
            **({} if trainer is None else {"trainer": [trainer.trainer, trainer.arguments, version("trl")]}),
        },
        rank=0,
    )
    if (there := store.read_content(key, _content())) is None:
        report = trace()
        store.write_content(key, _content(), (key, report))
        return report
    report = there[1]
    if report.time is None:
        return report
    time = duration(report.time.work, report.time.tokens, card, (one.bytes for one in report.collectives))
    return replace(report, time=time)


@cache
def _content() -> TypeAdapter[tuple[str, MemoryReport]]:
    return TypeAdapter(tuple[str, MemoryReport])
