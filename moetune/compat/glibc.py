"""glibc: memory that is freed goes back to the system."""

import ctypes
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h


def give_back_memory() -> None:
    """Make malloc map blocks of 1 MiB and more on their own, so that they go back to the system when they are freed.

    By default the limit grows, up to 32 MiB, with what a process has freed, and smaller tensors leave holes that stay
    part of the process: a process that reads and quantizes weights takes a fifth more. Does nothing where there is no
    glibc.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 1 << 20)
        mallopt(_TRIM_THRESHOLD, 32 << 20)
