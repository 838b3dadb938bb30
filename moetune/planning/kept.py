"""`kept`: a cache on disk of traced reports, so that a plan that is made again, or has the same runs, is quick.

Files are in `$MOETUNE_CACHE`, or else in `moetune/reports` under `$XDG_CACHE_HOME` or `~/.cache`. Reading executes
nothing from a file. A file that cannot be read or written is treated as missing. File names are digests of all that a
report depends on: the run, the GPU, torch's switches, the versions of libraries and moetune's source.
"""

import gzip
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
from pydantic import TypeAdapter

from moetune.adapt.guard import as_known
from moetune.errors import UserError
from moetune.files import cache_folder, source_digest, write_whole
from moetune.memory.assumed_routing import AssumedRouting
from moetune.memory.predict import allocator_here
from moetune.memory.report import MemoryReport
from moetune.models.catalog.gpus import Gpu, find_gpu
from moetune.run.resolve import ResolvedRun
from moetune.training.trl import InTrl

_MADE_BY = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")
"""Libraries whose versions a trace depends on."""


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
        "versions": {library: version(library) for library in _MADE_BY},
        "switches": _switches(),
        "source": source_digest("**/*.py"),
    }
    keys = [_digest({**about, "simulated": is_simulated}) for is_simulated in (True, simulated)]
    report = next((report for key in keys if (report := _read(key)) is not None), None)
    if report is None:
        report = trace()
        _write(_digest({**about, "simulated": simulated}), report)
    return report


def _digest(about: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _switches() -> list[bool]:
    """Return which kernels of attention torch may choose, and whether operations must be deterministic."""
    of = torch.backends.cuda
    kernels = of.flash_sdp_enabled, of.mem_efficient_sdp_enabled, of.cudnn_sdp_enabled, of.math_sdp_enabled
    return [is_on() for is_on in (*kernels, torch.are_deterministic_algorithms_enabled)]


@cache
def _content() -> TypeAdapter[tuple[str, MemoryReport]]:
    return TypeAdapter(tuple[str, MemoryReport])


def _file(key: str) -> Path:
    return cache_folder("reports") / f"{key}.json.gz"


def _read(key: str) -> MemoryReport | None:
    """Return the report in the file named by `key`; None if that is missing, damaged, or has another key inside."""
    try:
        inside, report = _content().validate_json(gzip.decompress(_file(key).read_bytes()))
    except UserError:
        raise
    except Exception:  # whatever is wrong with the file: a new one is made
        return None
    return report if inside == key else None  # a renamed file is not used


def _write(key: str, report: MemoryReport) -> None:
    """Write a report to the file named by `key`; an error of the file system is ignored, and an older file stays."""
    file = _file(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, gzip.compress(_content().dump_json((key, report)), 1))
    except OSError:
        return  # made again next time
