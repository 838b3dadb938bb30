"""A plan as a picture and as a page: memory against estimated speed, or else against the weights that train."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from moetune.files import write_output
from moetune.planning.plan import Plan
from moetune.planning.search import Candidate
from moetune.planning.tables import missed, next_larger, speed
from moetune.report.figures import INK, PAPER, refuse_unknown_format, rendered, style
from moetune.report.page import render
from moetune.report.units import gib

_GOALS = {"router": ("#0072b2", "s"), "experts": ("#d55e00", "o"), "lora": ("#009e73", "^")}


def save_figure(plan: Plan, path: Path) -> None:
    """Write the chart as PNG or SVG, by the file's suffix.

    Raises:
        UserError: the suffix is another one, or the file cannot be written.
    """
    refuse_unknown_format(path)
    with style():
        write_output(path, rendered(_draw(plan), path.suffix.lower()[1:]))


def write_page(plan: Plan, path: Path) -> None:
    """Write a page that loads nothing from elsewhere.

    Raises:
        UserError: the file cannot be written.
    """
    with style():
        svg = rendered(_draw(plan), "svg").decode() if plan.candidates else ""
    svg = svg[max(svg.find("<svg"), 0) :].replace(INK, "var(--ink)").replace(PAPER, "var(--paper)")
    lines = [text.plain for text in missed(plan)]
    page = render("plan.html.j2", plan=plan, svg=svg, missed=lines, next_larger=next_larger, speed=speed)
    write_output(path, page.encode())


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto front in order: less of the first coordinate, more of the second."""
    best: list[tuple[float, float]] = []
    for point in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best


def _draw(plan: Plan) -> Figure:
    figure = Figure(figsize=(8, 4.6), layout="constrained", facecolor=PAPER)
    axes = figure.subplots()
    has_speed = all(one.report.time is not None for one in plan.candidates)
    if not has_speed:
        axes.set_yscale("log", base=16)
        axes.yaxis.set_major_formatter(lambda size, _: gib(int(size)))
        axes.minorticks_off()
    axes.set_ylabel("tokens/s, estimated" if has_speed else "weights that train on a GPU")
    points, labelled = [], set[str]()
    for number, one in enumerate(plan.candidates, 1):
        colour, marker = _GOALS[one.goal]
        low, high = _height(one, has_speed=has_speed)
        x, y = one.report.required / 2**30, (low + high) / 2
        points.append((x, y))
        axes.errorbar(
            x, y, yerr=[[y - low], [high - y]], color=colour, marker=marker, markersize=9, linestyle="none",
            label=None if one.goal in labelled else one.goal,
        )  # fmt: skip
        labelled.add(one.goal)
        axes.annotate(str(number), (x, y), (-7, 5), textcoords="offset points", ha="right", fontweight="bold")
    if len(best := front(points)) > 1:
        axes.step(*zip(*best, strict=True), where="post", color=INK, linewidth=0.8, linestyle=":", zorder=0)
    card = plan.usable_bytes / 2**30
    axes.axvline(card, color=INK, linewidth=1.6, linestyle="--")
    axes.text(card, 1.01, f"{plan.gpu}: {gib(plan.usable_bytes)}", transform=axes.get_xaxis_transform(), ha="right")
    axes.set_xlim(0.92 * min([x for x, _ in points], default=0.0), 1.02 * card)
    axes.margins(y=0.12)
    axes.set_xlabel("needed of a GPU, GiB")
    axes.set_title(plan.model, loc="left", fontweight="bold", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if plan.candidates:
        axes.legend(frameon=False, loc="upper left")
    return figure


def _height(one: Candidate, *, has_speed: bool) -> tuple[float, float]:
    """Return the slow and the fast end of the speed, or the size of what trains."""
    if has_speed and one.report.time is not None:
        return one.report.time.tokens_per_second.slow, one.report.time.tokens_per_second.fast
    size = one.report.fullest.parts.trainable_weights
    return size, size
