"""Tables for `moetune verify --profile`: time of a step by part, and the share of measured limits."""

from collections.abc import Iterator

from moetune.memory.measurement.profile import Profile
from moetune.report.units import named
from moetune.report.view import Table, ViewSection


def profile_sections(profile: Profile) -> Iterator[ViewSection]:
    """Yield a table of the parts of a profiled step, and notes on the measured limits that it is compared with."""

    def rate(per_second: float | None, limit: float) -> tuple[str, str]:
        return (f"{per_second / 1e9:,.1f}", f"{per_second / limit:.0%}") if per_second else ("", "")

    has_host = profile.device != "cpu"
    rows = [
        (
            named(name),
            *(f"{1000 * seconds:,.0f}" for seconds in (part.seconds, part.host)[: 1 + has_host]),
            f"{part.work.launches:,.0f}",
            *rate(part.flops_per_second, profile.gemm),
            *rate(part.bytes_per_second, profile.copy),
        )
        for name, part in profile.parts.items()
    ]
    headings = ("part", ">ms", *((">host, ms",) * has_host), ">launches", ">GFLOP/s", ">share", ">GB/s", ">share")
    title = f"a step on {profile.device}, profiled: {profile.seconds:.3g} s, {profile.tokens:,} tokens"
    yield ViewSection(title, Table(headings, rows))
    waits = profile.synchronizations
    yield ViewSection(
        "what it is compared with",
        [
            *(["The profiler may not look at this GPU: its times are missing."] if waits is None else []),
            f"{profile.launches:,} launches, {'unknown' if waits is None else f'{waits:,}'} waits of the host",
            f"a product of {profile.dtype} reaches {profile.gemm / 1e9:,.1f} GFLOP/s here, a copy "
            f"{profile.copy / 1e9:,.1f} GB/s; GFLOP/s are of products and attention, GB/s of all else",
            "a profile makes the host slower",
        ],
    )
