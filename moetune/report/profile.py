"""A profiled step on a terminal, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from moetune.memory.profile import Profile
from moetune.report.terminal import named


def profile_table(profile: Profile) -> Iterator[RenderableType]:
    """Time by part, and beside each what the device did at most in the same process."""
    yield Text(f"\na step on {profile.device}, profiled: {profile.seconds:.3g} s, {profile.tokens:,} tokens", "bold")
    table = Table()
    on_cpu = profile.device == "cpu"
    times = ("ms",) if on_cpu else ("ms", "host, ms")
    for heading in ("part", *times, "launches", "GFLOP/s", "share", "GB/s", "share"):
        table.add_column(heading, justify="left" if heading == "part" else "right", no_wrap=True)
    for name, part in profile.parts.items():
        flops, size = part.flops_per_second, part.bytes_per_second
        of_limits = (
            *(
                "" if not flops else text
                for text in (f"{(flops or 0) / 1e9:,.1f}", f"{(flops or 0) / profile.gemm:.0%}")
            ),
            *("" if not size else text for text in (f"{(size or 0) / 1e9:,.1f}", f"{(size or 0) / profile.copy:.0%}")),
        )
        milliseconds = [f"{1000 * seconds:,.0f}" for seconds in (part.seconds, part.host)][: len(times)]
        table.add_row(named(name), *milliseconds, f"{part.work.launches:,.0f}", *of_limits)
    yield table
    waits = "unknown" if profile.synchronizations is None else f"{profile.synchronizations:,}"
    if profile.synchronizations is None:
        yield Text("The profiler may not look at this GPU: its times are missing.", "bold yellow")
    yield Text(
        f"{profile.launches:,} launches, {waits} waits of the host; a product of {profile.dtype} "
        f"reaches {profile.gemm / 1e9:,.1f} GFLOP/s here, a copy {profile.copy / 1e9:,.1f} GB/s. GFLOP/s are of "
        "products and attention, GB/s of all else. A profile makes the host slower.",
        "dim",
    )
