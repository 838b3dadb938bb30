"""How bytes are written for people. Nothing else knows what a GiB is."""

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def unit_for(count: int) -> tuple[str, int]:
    """The largest unit that `count` bytes fill once, as its name and its bytes; `("B", 1)` below a KiB."""
    return next(((name, size) for name, size in _UNITS if round(abs(count) / size, 2) >= 1), ("B", 1))


def gib(count: int) -> str:
    """Bytes in words: `25_000_000_000` is `23.28 GiB` (2^30 bytes); what is small in MiB, KiB or B."""
    name, size = unit_for(count)
    return f"{count} B" if size == 1 else f"{count / size:,.2f} {name}"


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""
