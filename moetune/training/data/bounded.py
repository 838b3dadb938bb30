"""Other people's code, a chat template say, in bounded memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATM = Path("/proc/self/statm")


@contextmanager
def bounded_memory(more: int) -> Iterator[None]:
    """Within it the process may take so many bytes more of addresses; beyond, Python raises `MemoryError`.

    Where there is no /proc nothing is bounded.
    """
    if not _STATM.is_file():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = int(_STATM.read_text().split()[0]) * resource.getpagesize() + more
    if soft == resource.RLIM_INFINITY or wanted < soft:
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
