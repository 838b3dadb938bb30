"""Two charts of a report: what each rank holds against the card, and one step as it passes.

Drawn without pyplot, so nothing global is left behind. Colours are Okabe and Ito's, which colour-blind readers can
tell apart (https://jfly.uni-koeln.de/color/).
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from moetune.errors import UserError
from moetune.files import write_output
from moetune.memory.report import PART_NAMES, MemoryReport, PartName, Parts, Sample
from moetune.report.terminal import alike, named, verdict
from moetune.report.units import gib, unit_for

COLOURS: dict[PartName, str] = {
    "frozen_weights": "#0072b2",
    "trainable_weights": "#56b4e9",
    "gradients": "#d55e00",
    "optimizer_states": "#e69f00",
    "master_weights": "#cc79a7",
    "saved_activations": "#009e73",
    "transient_peak": "#f0e442",
}
CACHED, OUTSIDE, LOADED = "#a9b1ba", "#6f7881", "#8db4cf"
INK, PAPER = "#1b1f24", "#fffffe"  # found again, and replaced, where a page has its own
_DARK = {COLOURS["frozen_weights"], COLOURS["gradients"], COLOURS["saved_activations"], OUTSIDE}
_LIFTED: dict[str, Any] = {"bbox": {"facecolor": PAPER, "edgecolor": "none", "pad": 1.2}}  # readable on any colour
_FORMATS = {".png": "png", ".svg": "svg"}
_MOST_BARS = 12
_MOST_SAMPLES = 400


class Box(NamedTuple):
    """A place in a figure, in shares of its width and height from the upper left."""

    left: float
    top: float
    width: float
    height: float


def refuse_unknown_format(path: Path) -> None:
    """Raises `UserError` unless the suffix is that of a picture that can be written."""
    if path.suffix.lower() not in _FORMATS:
        raise UserError(f"cannot draw {str(path)!r}: a figure is .png or .svg, not {path.suffix or 'without suffix'!r}")


def save_figure(report: MemoryReport, path: Path) -> None:
    """Writes both charts, the timeline where there is one, as PNG or SVG by the file's suffix.

    Raises:
        UserError: the suffix is another one, or the file cannot be written.
    """
    refuse_unknown_format(path)
    with style():
        figure, _ = _draw(report)
        figure.suptitle(f"{report.model}\n{verdict(report)}", x=0.01, ha="left", fontsize=12, fontweight="bold")
        write_output(path, rendered(figure, _FORMATS[path.suffix.lower()]))


def inline_svg(report: MemoryReport) -> tuple[str, Box | None]:
    """Both charts as an `<svg>` element without a title, and where in it the timeline lies."""
    with style():
        figure, timeline = _draw(report)
        svg = rendered(figure, "svg").decode()
    box = None
    if timeline is not None:
        place = timeline.get_position()  # settled by the drawing above
        box = Box(place.x0, 1 - place.y1, place.width, place.height)
    return svg[svg.index("<svg") :], box


def thinned(timeline: tuple[Sample, ...]) -> list[tuple[int, Sample]]:
    """At most a few hundred samples with their positions: the fullest of each stretch, and every first of a phase."""
    stretch = -(-len(timeline) // _MOST_SAMPLES)
    kept = {index for index, sample in enumerate(timeline) if sample.label} | {len(timeline) - 1}
    for start in range(0, len(timeline), stretch):
        kept.add(max(range(start, min(start + stretch, len(timeline))), key=lambda i: timeline[i].parts.total))
    return [(index, timeline[index]) for index in sorted(kept)]


# --- Drawing ------------------------------------------------------------------------------------------------------


@contextmanager
def style() -> Iterator[None]:
    settings: Any = {
        "font.size": 9,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.facecolor": "none",
        "text.parse_math": False,  # a name may hold a $
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "moetune",  # the same report gives the same file
    }
    with matplotlib.rc_context(settings):
        yield


def _draw(report: MemoryReport) -> tuple[Figure, Axes | None]:
    bars = min(len(alike(report.ranks)), _MOST_BARS) + 1
    heights = [0.9 + 0.42 * bars] + ([4.2, 2.57] if report.timeline else [])
    figure = Figure(figsize=(10, sum(heights) + 0.9), layout="constrained", facecolor=PAPER)
    axes = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    _draw_ranks(axes[0], report)
    if report.timeline:
        _draw_timeline(axes[1], report)
        _draw_moving(axes[2], report)
    drawn = [rank.parts for rank in report.ranks] + [sample.parts for sample in report.timeline]
    keys = [Patch(color=COLOURS[name], label=named(name)) for name in PART_NAMES if _any(drawn, name)]
    keys += [
        Patch(color=CACHED, label="cached, not in use"),
        Patch(color=OUTSIDE, label="outside the allocator"),
        Patch(color=LOADED, label="weights while they load"),
    ]
    figure.legend(handles=keys, loc="outside lower left", ncols=5, frameon=False)
    return figure, axes[1] if report.timeline else None


def _draw_ranks(axes: Axes, report: MemoryReport) -> None:
    """A bar for the peak of each kind of rank and one for loading, stacked to the process, against the card."""
    groups = alike(report.ranks)
    drawn = sorted(groups, key=lambda group: group[1].peak_process, reverse=True)[:_MOST_BARS]
    bars = []
    for numbers, rank in drawn:
        shown = numbers if len(numbers) <= 12 else f"{numbers[:11]}…"
        label = "peak of a step" if len(groups) == 1 else f"rank {shown}"
        tail = [(rank.peak_reserved - rank.peak_allocated, CACHED), (rank.outside_allocator, OUTSIDE)]
        bars.append((label, [(count, COLOURS[name]) for name, count in rank.parts.items()] + tail))
    bars.append(("loading", [(report.load.gpu, LOADED), (report.fullest.outside_allocator, OUTSIDE)]))
    room = report.gpu.usable_bytes if report.gpu else 0
    unit, size, end = _scale(report.peak_process, room)
    for row, (_, segments) in enumerate(bars):
        left = 0.0
        for count, colour in segments:
            width = count / size
            axes.barh(row, width, left=left, height=0.68, color=colour, edgecolor=PAPER, linewidth=0.6)
            if width > 0.085 * end:
                ink = "white" if colour in _DARK else "black"
                axes.text(left + width / 2, row, gib(count), ha="center", va="center", fontsize=8, color=ink)
            left += width
        axes.text(
            left + 0.006 * end, row, gib(sum(count for count, _ in segments)), va="center", fontweight="bold", **_LIFTED
        )
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, end)
    axes.set_xlabel(unit)
    if report.gpu is not None:
        label = f"{report.gpu.name}: {gib(room)} usable"
        if room / size < end:
            axes.axvline(room / size, color=INK, linewidth=1.6, linestyle="--")
            axes.text(room / size, -0.68, label, ha="center" if room / size < 0.8 * end else "right", va="bottom")
        else:
            axes.text(end, -0.68, f"{label}, far beyond this chart →", ha="right", va="bottom")
    left_out = f", the {_MOST_BARS} fullest of {len(groups)} kinds of rank" if len(groups) > _MOST_BARS else ""
    axes.set_title(f"Memory of a process{left_out}", loc="left", fontweight="bold", fontsize=10)
    _plain(axes)
    axes.tick_params(axis="y", length=0)


def _draw_timeline(axes: Axes, report: MemoryReport) -> None:
    """What tensors take, sample by sample. The card's line is lowered by what is outside the allocator."""
    points = thinned(report.timeline)
    positions = [index for index, _ in points]
    at, fullest = max(points, key=lambda point: point[1].parts.total)
    room = max(report.gpu.usable_bytes - report.fullest.outside_allocator, 0) if report.gpu else 0
    unit, size, end = _scale(fullest.parts.total, room)
    names = [name for name in PART_NAMES if _any((sample.parts for _, sample in points), name)]
    layers = [[getattr(sample.parts, name) / size for _, sample in points] for name in names]
    axes.stackplot(positions, layers, colors=[COLOURS[name] for name in names], linewidth=0)
    last = max(len(report.timeline) - 1, 1)
    axes.set_xlim(0, last)
    axes.set_ylim(0, end)
    axes.set_ylabel(unit)
    axes.set_xticks([])
    axes.set_xlabel("allocations and releases of tensors, in order →", loc="right", labelpad=16, fontsize=8)

    starts, below = phases(report.timeline), axes.get_xaxis_transform()
    for (label, start), stop in zip(starts, [start for _, start in starts[1:]] + [last], strict=True):
        axes.axvline(start, color=INK, linewidth=0.8, linestyle=":")
        if stop - start > 0.008 * len(label) * last:  # wide enough for its name
            axes.text((start + stop) / 2, -0.02, label, transform=below, ha="center", va="top", fontsize=8)
    top = fullest.parts.total / size
    axes.plot([at], [top], marker="v", markersize=7, color=INK, markeredgecolor=PAPER, clip_on=False)
    side = "left" if at < 0.6 * last else "right"
    axes.annotate(
        f"peak {gib(fullest.parts.total)}", (at, top), (8 if side == "left" else -8, 3), textcoords="offset points",
        ha=side, va="bottom", fontweight="bold",
    )  # fmt: skip
    if report.gpu is not None:
        label = f"{gib(room)}: what {report.gpu.name} leaves for tensors"
        if room / size < end:
            axes.axhline(room / size, color=INK, linewidth=1.6, linestyle="--")
            axes.text(0.995 * last, room / size + 0.012 * end, label, ha="right", va="bottom", **_LIFTED)
        else:
            axes.text(last, end, f"{label}, far above ↑", ha="right", va="bottom")
    axes.set_title("Tensors during a training step", loc="left", fontweight="bold", fontsize=10)
    _plain(axes)


def _draw_moving(axes: Axes, report: MemoryReport) -> None:
    """The same without what stands still all the time: the least of each part is left out."""
    points = thinned(report.timeline)
    least = {name: min(getattr(sample.parts, name) for sample in report.timeline) for name in PART_NAMES}
    moving = {name: [getattr(sample.parts, name) - least[name] for _, sample in points] for name in PART_NAMES}
    names = [name for name in PART_NAMES if any(moving[name])] or [PART_NAMES[-1]]
    unit, size, end = _scale(max(map(sum, zip(*moving.values(), strict=True))), 0)
    layers = [[count / size for count in moving[name]] for name in names]
    axes.stackplot([index for index, _ in points], layers, colors=[COLOURS[name] for name in names], linewidth=0)
    axes.set_xlim(0, max(len(report.timeline) - 1, 1))
    axes.set_ylim(0, end)
    axes.set_ylabel(unit)
    axes.set_xticks([])
    for _, start in phases(report.timeline):
        axes.axvline(start, color=INK, linewidth=0.8, linestyle=":")
    axes.set_title("The same without what stands still", loc="left", fontweight="bold", fontsize=10)
    _plain(axes)


def _scale(largest: int, room: int) -> tuple[str, int, float]:
    """Unit, its bytes, and the end of the axis: past the card, unless that would make the data too small to read."""
    longest = room if largest <= room <= 4 * largest else largest
    unit, size = unit_for(longest)
    return unit, size, 1.12 * max(longest, 1) / size


def phases(timeline: tuple[Sample, ...]) -> list[tuple[str, int]]:
    """Where each phase begins; one that goes on under the same label begins once."""
    phases: list[tuple[str, int]] = []
    for index, sample in enumerate(timeline):
        if sample.label and (not phases or phases[-1][0] != sample.label):
            phases.append((sample.label, index))
    return phases


def _any(moments: Iterable[Parts], name: PartName) -> bool:
    return any(getattr(parts, name) for parts in moments)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def rendered(figure: Figure, kind: str) -> bytes:
    content = io.BytesIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type")) if kind == "svg" else {"Software": "moetune"}
    figure.savefig(content, format=kind, dpi=150, facecolor=PAPER, metadata=metadata)
    # what tells a picture of ours from others', as the page's own comment and PNG's metadata do
    return content.getvalue().replace(b"<svg", b"<!-- written by moetune -->\n<svg", kind == "svg")
