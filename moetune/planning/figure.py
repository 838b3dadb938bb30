"""A plan as a chart: memory against estimated speed, or else against the weights that train."""

from __future__ import annotations

from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moetune.planning.plan import Plan
from moetune.planning.search import Candidate
from moetune.report.charts import INK, Chart
from moetune.report.units import gib

_GOALS = {"router": ("#0072b2", "s"), "experts": ("#d55e00", "o"), "lora": ("#009e73", "^")}


def plan_chart(plan: Plan) -> Chart:
    return Chart(plan.model, (8, 4.6), partial(_draw, plan))


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto front in order: less of the first coordinate, more of the second."""
    best: list[tuple[float, float]] = []
    for point in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best


def _draw(plan: Plan, figure: Figure) -> None:
    axes = figure.subplots()
    has_speed = all(one.report.time is not None for one in plan.candidates)
    if not has_speed:
        axes.set_yscale("log", base=16)
        axes.yaxis.set_major_formatter(lambda size, _: gib(int(size)))
        axes.minorticks_off()
    axes.set_ylabel("tokens/s, estimated" if has_speed else "weights that train on a GPU")
    points = []
    for number, one in enumerate(plan.candidates, 1):
        colour, marker = _GOALS[one.goal]
        x = one.report.required / 2**30
        low, high = _height(one, has_speed=has_speed)
        y = (low + high) / 2
        points.append((x, y))
        first = all(other.goal != one.goal for other in plan.candidates[: number - 1])
        axes.errorbar(
            x, y, yerr=[[y - low], [high - y]], color=colour, marker=marker, markersize=9, linestyle="none",
            label=one.goal if first else None,
        )  # fmt: skip
        axes.annotate(str(number), (x, y), (-7, 5), textcoords="offset points", ha="right", fontweight="bold")
    _draw_front(axes, front(points))
    card = plan.usable_bytes / 2**30
    axes.axvline(card, color=INK, linewidth=1.6, linestyle="--")
    axes.text(card, 1.01, f"{plan.gpu}: {gib(plan.usable_bytes)}", transform=axes.get_xaxis_transform(), ha="right")
    axes.set_xlim(0.92 * min([x for x, _ in points], default=0.0), 1.02 * card)
    axes.margins(y=0.12)
    axes.set_xlabel("needed of a GPU, GiB")
    if plan.candidates:
        axes.legend(loc="upper left")


def _height(one: Candidate, *, has_speed: bool) -> tuple[float, float]:
    if has_speed:
        assert one.report.time is not None
        ends = one.report.time.tokens_per_second
        return ends.slow, ends.fast
    size = one.report.fullest.parts.trainable_weights
    return size, size


def _draw_front(axes: Axes, points: list[tuple[float, float]]) -> None:
    """Draw the Pareto front as steps."""
    if len(points) > 1:
        axes.step(*zip(*points, strict=True), where="post", color=INK, linewidth=0.8, linestyle=":", zorder=0)
