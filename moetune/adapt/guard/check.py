"""Disable kernels that do not work on this machine, by a comparison now or earlier.

What failed is on disk, in one file for each card and its software, by the runs that were compared.
"""

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.metadata import distributions
from math import inf
from pathlib import Path
from socket import gethostname

import torch

from moetune.adapt.guard.comparison import Verdict, compare
from moetune.cache import cache_folder, read_cached, write_cached
from moetune.config.schema import RunConfig, TrainConfig
from moetune.files import expanded, source_digest
from moetune.kernels.registry import on_gpu, without_kernel
from moetune.models.catalog.gpus import Gpu
from moetune.parallel.ranks import SINGLE_RANK, Ranks
from moetune.run.resolved import ResolvedRun

KERNELS = ("kernels/*.py", "formats/*.py", "experts/*.py", "adapt/*.py", "adapt/layers/*.py", "adapt/guard/*.py")
"""Patterns, relative to the package, of the source files of kernels, their references and the models that call them."""
Failures = dict[str, dict[str, str]]
"""`_key` of the run files whose calls were compared -> operator -> what is wrong with its kernel."""


def compared_as(run: ResolvedRun) -> RunConfig:
    """Return the run file whose calls of kernels are compared for a run, and known for all runs that share it: on one
    rank, with random weights, and without settings that decide no call."""
    config, train = run.config, run.config.train
    adapt = config.adapt.but(start_from=None)
    if adapt.lora is not None:
        adapt = adapt.but(lora={"alpha": 16.0})
    return RunConfig(
        model=config.model.but(weights="random"),
        adapt=adapt,
        train=TrainConfig(
            checkpointing="none",  # the exercise itself turns it on
            expert_memory=train.expert_memory,
            dense_router_gradient=train.dense_router_gradient,
            merge_into=train.merge_into,
        ),
    )


def checked(
    run: ResolvedRun,
    device: torch.device,
    ranks: Ranks = SINGLE_RANK,
    say: Callable[[str], None] = lambda text: warnings.warn(text.removeprefix("warning: "), stacklevel=4),
) -> ResolvedRun:
    """Return a run whose `hardware.without_kernels` also lists the operators whose kernel fails on any rank's device.

    On a GPU the kernels are compared with torch's operations, unless what the same comparison found is on disk. The
    first rank of each machine and kind of GPU compares, with several ranks for at most half of `parallel.timeout`; the
    others wait. All ranks must make this call.

    Args:
        say: called on the first rank with texts for the user: that kernels are being compared, and which do not work.
    """
    if device.type != "cuda":
        return run
    file, runs = _file(device), (compared_as(run),)
    alike = ranks.gather((gethostname(), file.name))
    failed: dict[str, str] | None = {}
    if alike.index(alike[ranks.rank]) == ranks.rank and (failed := _known(file).get(_key(runs))) is None:
        tell = say if ranks.is_first else lambda _: None
        tell("comparing the kernels with torch's operations at the sizes of this run, once on this machine …")
        verdict = compared(device, runs, inf if ranks.is_single else run.config.parallel.timeout / 2)
        if verdict.stopped:
            tell(f"warning: the kernels could not be compared ({verdict.stopped}); they run unchecked")
        failed = verdict.failed
    on_any = {name: why for of_rank in ranks.gather(failed) for name, why in of_rank.items()}
    for name, why in on_any.items() if ranks.is_first else ():
        if name not in run.config.hardware.without_kernels:
            say(f"warning: the kernel of {name} {why}: torch's operations run in its place, slower and predicted so")
    return _without(run, on_any)


def compared(device: torch.device, runs: Sequence[RunConfig], limit: float = inf) -> Verdict:
    """Compare the kernels in the calls of `runs` for at most `limit` seconds, whatever earlier comparisons found.

    It is written to disk if it was complete, and with Triton: a compiler can be installed at any time.
    """
    verdict = compare(device, runs, limit)
    if not verdict.stopped and on_gpu() is not None:
        _write(_file(device), runs, verdict.failed)
    return verdict


def note_dropped(run: ResolvedRun, device: torch.device) -> ResolvedRun:
    """Return a run whose `hardware.without_kernels` also lists the kernels that failed to compile during the run.

    They are added to what the comparison found. Returns `run` itself if none failed.
    """
    failed = {name: why for name, why in without_kernel().items() if name not in run.config.hardware.without_kernels}
    if device.type != "cuda" or not failed:
        return run
    file, runs = _file(device), (compared_as(run),)
    if (known := _known(file).get(_key(runs))) is not None:  # else the next start compares
        _write(file, runs, known | failed)
    return _without(run, failed)


def as_known(run: ResolvedRun, card: Gpu | None) -> ResolvedRun:
    """Return a run whose `hardware.without_kernels` also lists the kernels that failed an earlier comparison on `card`.

    Nothing is compared: the result follows from what earlier comparisons on this machine found for the run, or, without
    one, for all others. Returns `run` itself without CUDA, without a comparison, or if this machine's first
    GPU differs from `card` in both name and total memory. `card` None stands for the first GPU.
    """
    if not torch.cuda.is_available():
        return run
    device = torch.device("cuda", 0)
    properties = torch.cuda.get_device_properties(device)
    # a card that is not in the catalog is known by its memory
    if card is not None and card.full_name != properties.name and card.memory.value != properties.total_memory:
        return run
    known = _known(_file(device))
    if not any(known.values()):
        return run
    return _without(run, known.get(_key((compared_as(run),)), {name for failed in known.values() for name in failed}))


def _file(device: torch.device) -> Path:
    """Return the file of what comparisons found, named by a digest of all that this depends on apart from the run."""
    driver = ""
    with suppress(OSError):  # there is no such file under WSL
        driver = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    about = (
        torch.cuda.get_device_name(device),
        torch.cuda.get_device_capability(device),
        driver,
        torch.__version__,
        [triton.version for triton in distributions(name="triton")],
        [os.environ.get(name) for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")],
        source_digest(*KERNELS),
    )
    return cache_folder("kernels") / f"kernels-{_digest(about)}.json.gz"


def _key(runs: Sequence[RunConfig]) -> str:
    """Return a digest of run files and of their models' config.json: another model may have the same relative path."""
    files = [expanded(run.model.path) / "config.json" for run in runs]
    return _digest((runs, [file.read_bytes() if file.is_file() else b"" for file in files]))


def _digest(about: object) -> str:
    return hashlib.sha256(repr(about).encode()).hexdigest()[:32]


def _known(file: Path) -> Failures:
    known: Failures | None = read_cached(file, Failures)
    return known or {}


def _write(file: Path, runs: Sequence[RunConfig], failed: dict[str, str]) -> None:
    write_cached(file, Failures, _known(file) | {_key(runs): failed})


def _without(run: ResolvedRun, failed: Iterable[str]) -> ResolvedRun:
    names = tuple(sorted({*run.config.hardware.without_kernels, *failed}))
    return run.but(hardware={"without_kernels": names})
