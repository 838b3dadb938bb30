"""The memory report as one HTML file that asks for nothing outside itself."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from moetune.files import write_output
from moetune.memory.report import PART_NAMES, MemoryReport
from moetune.report import terminal
from moetune.report.figures import COLOURS, INK, PAPER, inline_svg, phases, thinned
from moetune.report.units import gib, percent


def write_page(report: MemoryReport, path: Path) -> None:
    """Writes the page, whole or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    write_output(path, render_page(report).encode())


def render(template: str, **values: Any) -> str:
    """A page of one of the templates beside this file, with the style that they share."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"gib": gib, "percent": percent, "named": terminal.named, "grouped": "{:,}".format}
    return environment.get_template(template).render(**values)


def render_page(report: MemoryReport) -> str:
    svg, box = inline_svg(report)
    return render(
        "page.html.j2",
        report=report,
        rank=report.fullest,
        words=terminal,
        colours=COLOURS,
        # The page's own colours, so that the charts follow a dark theme.
        svg=svg.replace(INK, "var(--ink)").replace(PAPER, "var(--paper)"),
        box=box,
        samples=_samples(report) if box else [],
    )


def _samples(report: MemoryReport) -> list[dict[str, Any]]:
    """What the pointer shows over the timeline, in words: a script that only looks up cannot round differently."""
    starts = phases(report.timeline)
    positions = [start for _, start in starts]
    last = max(len(report.timeline) - 1, 1)
    samples = []
    for index, sample in thinned(report.timeline):
        phase = bisect_right(positions, index) - 1
        title = f"{starts[phase][0]}: " if phase >= 0 else ""
        lines = [[COLOURS[name], f"{terminal.named(name)} {gib(getattr(sample.parts, name))}"] for name in PART_NAMES]
        lines = [line for line, count in zip(lines, sample.parts, strict=True) if count]
        samples.append({"at": round(index / last, 5), "title": title + gib(sample.parts.total), "lines": lines})
    return samples
