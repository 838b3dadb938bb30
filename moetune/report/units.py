"""Bytes, percentages, estimated ranges and hours as text, for all commands."""

from moetune.memory.time.estimate import Duration, Range

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def unit_for(count: int) -> tuple[str, int]:
    """Return the unit to print `count` bytes in, as (name, its bytes): the largest of GiB, MiB and KiB of which there
    is at least 1, else `("B", 1)`."""
    return next(((name, size) for name, size in _UNITS if round(abs(count) / size, 2) >= 1), ("B", 1))


def gib(count: int) -> str:
    """Format bytes with two digits: `25_000_000_000` is `23.28 GiB` (2^30 bytes); smaller counts in MiB, KiB or B."""
    name, size = unit_for(count)
    return f"{count} B" if size == 1 else f"{count / size:,.2f} {name}"


def from_to(low: int, high: int) -> str:
    """Format a range of bytes in the unit of its upper end: `26.40 to 28.10 GiB`; as one number if both read alike."""
    name, size = unit_for(high)
    low_text, high_text = (f"{count / size:,.2f}" if size > 1 else str(count) for count in (low, high))
    return gib(high) if low_text == high_text else f"{low_text} to {high_text} {name}"


def percent(part: float, whole: float, digits: int = 1) -> str:
    """Format `part / whole` as a percentage with `digits` decimals, such as `12.5 %`; empty if `whole` is 0."""
    return f"{100 * part / whole:.{digits}f} %" if whole else ""


def named(part: str) -> str:
    """Format a name of the program for readers: `frozen_weights` becomes `frozen weights`."""
    return part.replace("_", " ")


def between(ends: Range) -> str:
    """Format a range as `2 to 4`, the ends with two significant digits; as one number if they are equal."""
    rounded = (float(f"{end:.2g}") for end in sorted((ends.fast, ends.slow)))
    low, high = (f"{end:,.0f}" if end >= 10 else f"{end:g}" for end in rounded)
    return low if low == high else f"{low} to {high}"


def hours(time: Duration, tokens: int | None) -> str:
    """Format the hours that `tokens` tokens take, to follow a speed: `, 2 to 4 h for 5,000,000 tokens`; empty if
    `tokens` is None."""
    return "" if tokens is None else f", {between(time.hours(tokens))} h for {tokens:,} tokens"
