"""Bytes, shares, speeds and times as text. Nothing else writes GiB."""

from moetune.memory.time.roofline import Duration, Range

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def unit_for(count: int) -> tuple[str, int]:
    """Return the largest unit that `count` bytes fill once, as its name and its bytes; `("B", 1)` below a KiB."""
    return next(((name, size) for name, size in _UNITS if round(abs(count) / size, 2) >= 1), ("B", 1))


def gib(count: int) -> str:
    """Write bytes: `25_000_000_000` is `23.28 GiB` (2^30 bytes); smaller counts in MiB, KiB or B."""
    name, size = unit_for(count)
    return f"{count} B" if size == 1 else f"{count / size:,.2f} {name}"


def percent(part: float, whole: float, digits: int = 1) -> str:
    return f"{100 * part / whole:.{digits}f} %" if whole else ""


def named(part: str) -> str:
    """Write the name of a part: `frozen_weights` as `frozen weights`."""
    return part.replace("_", " ")


def between(ends: Range) -> str:
    """Write an estimate as `2 to 4`, with two digits, the smaller end first."""
    rounded = (float(f"{end:.2g}") for end in sorted((ends.fast, ends.slow)))
    less, more = (f"{end:,.0f}" if end >= 10 else f"{end:g}" for end in rounded)
    return less if less == more else f"{less} to {more}"


def hours(time: Duration, tokens: int | None) -> str:
    """Write the hours for so many tokens; empty if their number is unknown."""
    return "" if tokens is None else f", {between(time.hours(tokens))} h for {tokens:,} tokens"
