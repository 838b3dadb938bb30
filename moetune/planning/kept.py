"""A cache on disk of traced reports (`kept`) and of what a search found (`read_candidate`, `read_beyond`).

A plan that is made again, or has the same runs or strategies, is quick; the processes of a plan share what they found.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moetune.adapt.guard import as_known
from moetune.cache import file_of, read_cached, write_cached
from moetune.memory.assumed_routing import AssumedRouting
from moetune.memory.predict import allocator_here
from moetune.memory.report import MemoryReport
from moetune.memory.time.roofline import duration
from moetune.models.catalog.gpus import Gpu, find_gpu
from moetune.planning.candidate import Candidate, worth
from moetune.planning.strategies import Strategy
from moetune.run.resolve import ResolvedRun
from moetune.run.resolved import ResolvedModel
from moetune.training.trl import InTrl

_Found = tuple[int, Candidate | None]
"""`more_than` and what was found, as in `write_candidate`."""


def what_decides(
    config: dict[str, Any],
    model: ResolvedModel,
    gpu: str | Gpu | None,
    routing: AssumedRouting,
    trainer: InTrl | None = None,
) -> dict[str, Any]:
    """Return all that the report of a run depends on, as values for `file_of`.

    Args:
        config: the run's configuration as JSON values, without its output.
        model: its model.
        gpu: a GPU's name, a size such as `44GiB`, or a catalog entry; None for `hardware.gpu`.
        routing: how many tokens each expert is assumed to receive.
        trainer: the trainer of TRL that is predicted; None for moetune's own.
    """
    return {
        "report": config,
        "settings": [model.settings.to_dict(), model.source.config.to_dict()],
        "published": model.source.quantization.method,
        "gpu": [gpu if isinstance(gpu, str) else None, asdict(_card(gpu, config["hardware"]["gpu"]))],
        "routing": asdict(routing),
        "allocator": allocator_here("expandable"),
        **({} if trainer is None else {"trainer": [trainer.trainer, trainer.arguments, version("trl")]}),
    }


def kept(
    run: ResolvedRun,
    gpu: str | Gpu | None,
    routing: AssumedRouting,
    trace: Callable[[], MemoryReport],
    trainer: InTrl | None = None,
) -> MemoryReport:
    """Read the traced report of a run on a GPU from disk; if it is not there, call `trace` for it, and write it.

    In a report from disk the time of a step is estimated anew from the work that was counted, by the speeds that are
    known now.

    Args:
        gpu, routing, trainer: as in `what_decides`.
        trace: makes the report.
    """
    name = gpu or run.config.hardware.gpu
    known = as_known(run, None if name is None else _card(gpu, run.config.hardware.gpu))  # as `predict` does
    config = known.config.model_dump(mode="json", exclude={"output"})
    file = file_of(what_decides(config, run.model, gpu, routing, trainer))
    if (report := read_cached(file, MemoryReport)) is None:
        report = trace()
        write_cached(file, MemoryReport, report)
        return report
    if report.time is None:
        return report
    card = _card(gpu, run.config.hardware.gpu)
    time = duration(report.time.work, report.time.tokens, card, (one.bytes for one in report.collectives))
    return replace(report, time=time)


def _card(gpu: str | Gpu | None, of_run: str | None) -> Gpu:
    name = gpu or of_run or "l40s"
    return name if isinstance(name, Gpu) else find_gpu(name)


def read_candidate(about: dict[str, Any], strategy: Strategy, more_than: int) -> tuple[Candidate | None] | None:
    """Read from disk the largest run of a strategy that trains more than `more_than` (`Candidate.amount`), None if
    there is none, as a tuple of one; None if it is not on disk.

    What was found with another `more_than` is used if it answers for this one too.

    Args:
        about: all that the search depends on, except the strategy and `more_than`.
    """
    if (there := read_cached(_file(about, strategy), _Found)) is None:
        return None
    least, found = there
    if found is None:
        return (None,) if least <= more_than else None
    is_more = not more_than or found.amount > worth(more_than)
    return (replace(found, strategy=strategy) if is_more else None,)


def write_candidate(about: dict[str, Any], strategy: Strategy, more_than: int, found: Candidate | None) -> None:
    """Write to disk what was found for the arguments of `read_candidate`."""
    write_cached(_file(about, strategy), _Found, (more_than, found))


def read_beyond(about: dict[str, Any], strategy: Strategy) -> tuple[int, int]:
    """Read from disk what `write_beyond` wrote for a strategy that differs in the optimizer or checkpointing at most.

    Returns (amount, bytes); (0, 0) if there is nothing. `about` is as in `read_candidate`.
    """
    return read_cached(_file_of_beyond(about, strategy), tuple[int, int]) or (0, 0)


def write_beyond(about: dict[str, Any], strategy: Strategy, amount: int, beyond: int) -> None:
    """Write to disk what a run of a strategy that trains `amount` needs beyond its lower bound, in bytes
    (`Bounds.beyond`), unless that of a run that trains less is there."""
    known, _ = read_beyond(about, strategy)
    if not 0 < known < amount:
        write_cached(_file_of_beyond(about, strategy), tuple[int, int], (amount, beyond))


def _file_of_beyond(about: dict[str, Any], strategy: Strategy) -> Path:
    return file_of({**about, "beyond": [strategy.goal, strategy.storage_and_layout]})


def _file(about: dict[str, Any], strategy: Strategy) -> Path:
    return file_of({**about, "strategy": asdict(strategy)})
