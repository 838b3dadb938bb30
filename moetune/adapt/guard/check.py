"""Disable the kernels that do not work on this machine: by comparing them before a run, or from earlier verdicts."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf
from pathlib import Path
from socket import gethostname

import torch

from moetune.adapt.guard.comparison import compare
from moetune.adapt.guard.exercise import Sizes, sizes_of
from moetune.adapt.guard.verdicts import Key, Verdict, failed_at_any_sizes, keep, kept
from moetune.kernels.registry import without_kernel
from moetune.models.catalog.gpus import Gpu
from moetune.parallel.ranks import SINGLE_RANK, Ranks
from moetune.run.resolved import ResolvedRun

_not_kept: dict[Path, Verdict] = {}
"""Verdicts of this process that could not be, or must not be, written to disk, by the file that they would be in."""


def checked(
    run: ResolvedRun,
    device: torch.device,
    ranks: Ranks = SINGLE_RANK,
    say: Callable[[str], None] = lambda text: warnings.warn(text.removeprefix("warning: "), stacklevel=4),
) -> ResolvedRun:
    """Return a run whose `hardware.without_kernels` also lists the operators whose kernel fails on any rank's device.

    On a GPU the kernels are compared with torch's operations, unless the verdict of the same comparison is on disk
    (verdicts.py). The first rank of each machine and kind of GPU compares, with several ranks for at most half of
    `parallel.timeout`; the others wait. All ranks must make this call.

    Args:
        say: called on the first rank with texts for the user: that kernels are being compared, and which do not work.
    """
    if device.type != "cuda" or not any(sizes := sizes_of(run)):
        return run
    key = Key.of(device, sizes)
    alike = ranks.gather((gethostname(), key.file.name))
    failed = dict[str, str]()
    if alike.index(alike[ranks.rank]) == ranks.rank:
        limit = inf if ranks.is_single else run.config.parallel.timeout / 2
        failed = _verdict_here(key, device, limit, say if ranks.is_first else lambda _: None).failed
    failed = {name: why for one in ranks.gather(failed) for name, why in one.items()}
    for name, why in failed.items() if ranks.is_first else ():
        if name not in run.config.hardware.without_kernels:
            say(f"warning: the kernel of {name} {why}: torch's operations run in its place, slower and predicted so")
    return _without(run, failed)


def _verdict_here(key: Key, device: torch.device, limit: float, say: Callable[[str], None]) -> Verdict:
    """Return the verdict from disk or from earlier in this process; else compare, for at most `limit` seconds."""
    verdict = kept(key) or _not_kept.get(key.file)
    if verdict is None:
        say("comparing the kernels with torch's operations at the sizes of this run, once on this machine …")
        verdict = compare(key, device, limit)
        if kept(key) is None:
            _not_kept[key.file] = verdict
        if not verdict.is_complete:
            say(f"warning: the kernels could not be compared ({verdict.stopped}); they run unchecked")
    return verdict


def note_dropped(run: ResolvedRun, device: torch.device) -> ResolvedRun:
    """Return a run whose `hardware.without_kernels` also lists the kernels that failed to compile during the run.

    They are added to the verdict on disk, if there is one. Returns `run` itself if none failed.
    """
    failed = {name: why for name, why in without_kernel().items() if name not in run.config.hardware.without_kernels}
    if device.type != "cuda" or not failed:
        return run
    key = Key.of(device, sizes_of(run))
    if (known := kept(key)) is not None:  # else the next start compares
        keep(Verdict(key, known.failed | failed))
    return _without(run, failed)


def as_known(run: ResolvedRun, card: Gpu | None) -> ResolvedRun:
    """Return a run whose `hardware.without_kernels` also lists the kernels that failed an earlier comparison on `card`.

    Nothing is compared: the result follows from verdicts, the files in which earlier runs on this machine recorded how
    kernels compared, and from those of this process that are in no file. The verdict at the run's sizes counts; without
    one, those at all other sizes. Returns `run` itself without CUDA, without a verdict, or if this machine's first GPU
    differs from `card` in both name and total memory. `card` None stands for the first GPU.
    """
    if not torch.cuda.is_available():
        return run
    device = torch.device("cuda", 0)
    here = torch.cuda.get_device_properties(device)
    # a card that is not in the catalog is known by its memory
    if card is not None and card.full_name != here.name and card.memory.value != here.total_memory:
        return run
    failed = failed_at_any_sizes(Key.of(device, Sizes()))
    if not (failed or _not_kept) or not any(sizes := sizes_of(run)):
        return run
    key = Key.of(device, sizes)
    verdict = kept(key) or _not_kept.get(key.file)
    return _without(run, failed if verdict is None else verdict.failed)


def _without(run: ResolvedRun, failed: Iterable[str]) -> ResolvedRun:
    names = tuple(sorted({*run.config.hardware.without_kernels, *failed}))
    return replace(run, config=run.config.but(hardware={"without_kernels": names}))
