"""Parser of memory sizes such as `44GiB`."""

import re
from decimal import Decimal

_UNITS = {"B": 1, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*(B|[MGT]i?B)", re.IGNORECASE | re.ASCII)
HOW_TO_WRITE_A_SIZE = "A size is written like 44GiB (2^30 bytes), 48GB (10^9 bytes) or 45056MiB."


def parse_size(text: str) -> int | None:
    """Return the number of bytes of `44GiB`, `48 GB` or `45056MiB`; None if the text is not a size.

    Fractions of a byte are dropped. A sign is accepted, so the result can be negative.
    """
    match = _SIZE.fullmatch(text.strip())
    return None if match is None else int(Decimal(match[1]) * _UNITS[match[2].upper()])
