"""Charts of a `MemoryReport`: each rank's peak against the GPU, timeline of a step."""

from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from moetune.memory.report import PART_NAMES, MemoryReport, PartName, Parts, Sample
from moetune.report.charts import COLOURS, INK, PAPER, Chart
from moetune.report.memory import alike, verdict
from moetune.report.units import gib, named, unit_for

_CACHED, _OUTSIDE, _LOADED = "#a9b1ba", "#6f7881", "#8db4cf"
_DARK = {COLOURS["frozen_weights"], COLOURS["gradients"], COLOURS["saved_activations"], _OUTSIDE}
_MOST_BARS = 12
_MOST_SAMPLES = 400


def memory_chart(report: MemoryReport) -> Chart:
    """Return one chart with the bars of all ranks and, if the report has a timeline, the timeline below them."""
    bars = min(len(alike(report.ranks)), _MOST_BARS) + 1
    heights = [0.9 + 0.42 * bars] + [4.2] * bool(report.timeline)

    def draw(figure: Figure) -> None:
        axes = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
        _draw_ranks(axes[0], report)
        if report.timeline:
            _draw_timeline(axes[1], report)
        drawn = [rank.parts for rank in report.ranks] + [sample.parts for sample in report.timeline]
        keys = [Patch(color=COLOURS[name], label=named(name)) for name in _present(drawn)]
        labelled_colours = (
            (_CACHED, "cached, not in use"),
            (_OUTSIDE, "outside the allocator"),
            (_LOADED, "weights while they load"),
        )
        keys += [Patch(color=colour, label=label) for colour, label in labelled_colours]
        figure.legend(handles=keys, loc="outside lower left", ncols=5)

    card = "" if report.gpu is None else f" for {report.gpu.name}"
    title = f"memory of a step, predicted{card}"
    return Chart(title, (10, sum(heights) + 0.9), draw, f"{report.model}\n{verdict(report)}")


def _draw_ranks(axes: Axes, report: MemoryReport) -> None:
    """Draw a stacked bar for the peak of each group of equal ranks, a bar for loading, and the GPU's memory."""
    groups = alike(report.ranks)
    bars = []
    for numbers, rank in sorted(groups, key=lambda group: group[1].peak_process, reverse=True)[:_MOST_BARS]:
        shown = numbers if len(numbers) <= 12 else f"{numbers[:11]}…"
        label = "peak of a step" if len(groups) == 1 else f"rank {shown}"
        rest = [(rank.peak_reserved - rank.peak_allocated, _CACHED), (rank.outside_allocator, _OUTSIDE)]
        bars.append((label, [(count, COLOURS[name]) for name, count in rank.parts.items()] + rest))
    bars.append(("loading", [(report.load.gpu, _LOADED), (report.fullest.outside_allocator, _OUTSIDE)]))
    usable = report.gpu.usable_bytes if report.gpu else 0
    # The axis extends past the GPU's memory, unless the bars would become too small to read.
    longest = usable if report.peak_process <= usable <= 4 * report.peak_process else report.peak_process
    unit, size = unit_for(longest)
    end = 1.12 * max(longest, 1) / size
    for row, (_, segments) in enumerate(bars):
        left = 0.0
        for count, colour in segments:
            width = count / size
            axes.barh(row, width, left=left, height=0.68, color=colour, edgecolor=PAPER, linewidth=0.6)
            if width > 0.085 * end:
                ink = "white" if colour in _DARK else "black"
                axes.text(left + width / 2, row, gib(count), ha="center", va="center", fontsize=8, color=ink)
            left += width
        total = gib(sum(count for count, _ in segments))
        axes.text(left + 0.006 * end, row, total, va="center", fontweight="bold")
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, end)
    axes.set_xlabel(unit)
    if report.gpu is not None:
        at = min(usable / size, end)
        off_chart = ", far beyond this chart →" if usable > end * size else ""
        axes.axvline(at, color=INK, linewidth=1.6, linestyle="--")
        label = f"{report.gpu.name}: {gib(usable)} usable{off_chart}"
        axes.text(at, -0.68, label, ha="center" if at < 0.8 * end else "right", va="bottom")
    left_out = f", the {_MOST_BARS} fullest of {len(groups)} kinds of rank" if len(groups) > _MOST_BARS else ""
    axes.set_title(f"Memory of a process{left_out}")
    axes.tick_params(axis="y", length=0)


def _draw_timeline(axes: Axes, report: MemoryReport) -> None:
    """Draw each part's bytes above its minimum over the step, stacked; the title states the sum of the minima."""
    points = thinned(report.timeline)
    at, fullest = max(points, key=lambda point: point[1].parts.total)
    names = _present(sample.parts for _, sample in points) or [PART_NAMES[0]]
    least = {name: min(getattr(sample.parts, name) for sample in report.timeline) for name in names}
    still = sum(least.values())
    unit, size = unit_for(fullest.parts.total)
    layers = [[(getattr(sample.parts, name) - least[name]) / size for _, sample in points] for name in names]
    last = max(len(report.timeline) - 1, 1)
    axes.stackplot([index for index, _ in points], layers, colors=[COLOURS[name] for name in names], linewidth=0)
    top = (fullest.parts.total - still) / size
    axes.set_xlim(0, last)
    axes.set_ylim(0, 1.12 * max(top, 1 / size))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value + still / size:,.2f}")
    axes.set_ylabel(unit)
    axes.set_xticks([])
    axes.set_xlabel("allocations and releases of tensors, in order →", loc="right", labelpad=16, fontsize=8)
    starts = [(sample.label, index) for index, sample in enumerate(report.timeline) if sample.label]
    below = axes.get_xaxis_transform()
    for (label, start), stop in zip(starts, [start for _, start in starts[1:]] + [last], strict=True):
        axes.axvline(start, color=INK, linewidth=0.8, linestyle=":")
        if stop - start > 0.008 * len(label) * last:  # wide enough for the label
            axes.text((start + stop) / 2, -0.02, label, transform=below, ha="center", va="top", fontsize=8)
    axes.plot([at], [top], marker="v", markersize=7, color=INK, markeredgecolor=PAPER, clip_on=False)
    side = "left" if at < 0.6 * last else "right"
    label = f"  peak {gib(fullest.parts.total)}  "
    axes.text(at, top, label, ha=side, va="bottom", fontweight="bold")
    axes.set_title(f"Tensors during a training step, above {gib(still)} that do not change")


def thinned(timeline: tuple[Sample, ...]) -> list[tuple[int, Sample]]:
    """Reduce a timeline to about 400 (index, sample) pairs, in order.

    Kept are the fullest sample of each of up to 400 sections, the first sample of each phase, and the last sample.
    """
    stretch = -(-len(timeline) // _MOST_SAMPLES)
    kept = {index for index, sample in enumerate(timeline) if sample.label} | {len(timeline) - 1}
    for start in range(0, len(timeline), stretch):
        kept.add(max(range(start, min(start + stretch, len(timeline))), key=lambda i: timeline[i].parts.total))
    return [(index, timeline[index]) for index in sorted(kept)]


def _present(moments: Iterable[Parts]) -> list[PartName]:
    """Return the parts that have bytes in at least one of the moments."""
    moments = list(moments)
    return [name for name in PART_NAMES if any(getattr(parts, name) for parts in moments)]
