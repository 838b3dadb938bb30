"""Verdicts: results of comparing kernels on this machine, kept on disk so that later runs need not compare again."""

import ctypes
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from moetune.adapt.guard.exercise import Sizes
from moetune.cache import cache_folder, read_cached, write_cached
from moetune.files import source_digest

KERNELS = ("kernels/*.py", "formats/*.py", "experts/*.py", "adapt/*.py", "adapt/layers/*.py", "adapt/guard/*.py")
"""Patterns, relative to the package, of the source files of kernels, their references and the exercises."""


@dataclass(frozen=True)
class Key:
    """Everything that a verdict depends on.

    Attributes:
        card: the GPU's name and compute capability.
        driver: version of the driver, and of the CUDA that it supports.
        versions: of torch and Triton; for ptxas, "Triton's own" or the files that the environment names (`_ptxas`).
        kernels: digest of `KERNELS`.
        sizes: the sizes at which they are compared.
    """

    card: str
    driver: str
    versions: dict[str, str]
    kernels: str
    sizes: Sizes

    @classmethod
    def of(cls, device: torch.device, sizes: Sizes) -> "Key":
        """Return the key of a comparison on a device of this machine."""
        major, minor = torch.cuda.get_device_capability(device)
        card = f"{torch.cuda.get_device_name(device)}, {major}.{minor}"
        versions = {"torch": torch.__version__, "triton": _triton(), "ptxas": _ptxas()}
        return cls(card, driver_here(), versions, source_digest(*KERNELS), sizes)

    @property
    def file(self) -> Path:
        """The file of the verdict; names of keys that differ only in `sizes` have the same beginning."""
        body = asdict(self)
        sizes = body.pop("sizes")
        names = (hashlib.sha256(json.dumps(one, sort_keys=True).encode()).hexdigest()[:16] for one in (body, sizes))
        return cache_folder("kernels") / f"{'-'.join(names)}.json.gz"


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        key: what was compared, and where.
        failed: operator -> what is wrong with its kernel, such as `differs by …`.
        stopped: why the comparison ended before all operators were compared; empty if it did not.
    """

    key: Key
    failed: dict[str, str]
    stopped: str = ""

    @property
    def is_complete(self) -> bool:
        return not self.stopped


def kept(key: Key) -> Verdict | None:
    """Return the verdict that is on disk for a key; None if there is none, or its file is damaged."""
    verdict: Verdict | None = read_cached(key.file, Verdict)
    return verdict if verdict is not None and verdict.key == key else None


def failed_at_any_sizes(key: Key) -> frozenset[str]:
    """Return the operators that failed in any verdict on disk whose key equals `key` except in `sizes`."""
    folder = key.file.parent
    try:
        return _failed_of(key.file.with_name(f"{key.file.stem.partition('-')[0]}-*.json.gz"), folder.stat().st_mtime_ns)
    except OSError:
        return frozenset()


@lru_cache(1)  # a plan asks for every run that it tries
def _failed_of(files: Path, changed: int) -> frozenset[str]:
    verdicts = (read_cached(file, Verdict) for file in files.parent.glob(files.name))
    return frozenset(name for verdict in verdicts if verdict is not None for name in verdict.failed)


def keep(verdict: Verdict) -> None:
    """Write a verdict to disk if its comparison was complete, else do nothing; ignore errors of the file system."""
    if verdict.is_complete:
        write_cached(verdict.key.file, Verdict, verdict)


def driver_here() -> str:
    """Return the version line of the CUDA driver's kernel module, with the CUDA version it supports (`CUDA 13000`)."""
    module, cuda = "", ctypes.c_int()
    with suppress(OSError):  # there is no such file under WSL
        module = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(cuda))
    return f"{module} CUDA {cuda.value}".strip()


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def _ptxas() -> str:
    """Return which ptxas Triton calls: its own, or files named by the environment, with size and time of change."""
    named = []
    for variable in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        if path := os.environ.get(variable):
            with suppress(OSError):
                found = Path(path).stat()
                named.append(f"{path} {found.st_size} {found.st_mtime_ns}")
    return ", ".join(named) or "Triton's own"
