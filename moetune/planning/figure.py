"""The chart of a plan: each candidate's memory against its speed or trainable weights."""

from functools import partial

from matplotlib.figure import Figure

from moetune.planning.plan import Plan
from moetune.report.charts import INK, Chart
from moetune.report.units import gib

_GOALS = {"router": ("#0072b2", "s"), "experts": ("#d55e00", "o"), "lora": ("#009e73", "^")}


def plan_chart(plan: Plan) -> Chart:
    """Return the chart of a plan: a numbered point for each candidate, and the GPU's memory.

    The vertical axis is tokens/s, if estimated for all candidates; else the bytes of trainable weights on a GPU.
    """
    return Chart(plan.model, (8, 4.6), partial(_draw, plan))


def _draw(plan: Plan, figure: Figure) -> None:
    axes = figure.subplots()
    has_speed = all(run.report.time is not None for run in plan.candidates)
    if not has_speed:
        axes.set_yscale("log", base=16)
        axes.yaxis.set_major_formatter(lambda size, _: gib(int(size)))
        axes.minorticks_off()
    axes.set_ylabel("tokens/s, estimated" if has_speed else "weights that train on a GPU")
    for number, candidate in enumerate(plan.candidates, 1):
        report, time = candidate.report, candidate.report.time
        x, y = report.required / 2**30, float(report.fullest.parts.trainable_weights)
        if has_speed and time is not None:
            y = time.tokens_per_second.middle
        colour, marker = _GOALS[candidate.goal]
        axes.plot(x, y, marker, color=colour, markersize=9, label=candidate.goal)
        axes.annotate(str(number), (x, y), (-7, 5), textcoords="offset points", ha="right", fontweight="bold")
    card = plan.usable_bytes / 2**30
    axes.axvline(card, color=INK, linewidth=1.6, linestyle="--")
    axes.text(card, 1.01, f"{plan.gpu}: {gib(plan.usable_bytes)}", transform=axes.get_xaxis_transform(), ha="right")
    axes.set_xlim(0.92 * min((run.report.required / 2**30 for run in plan.candidates), default=0.0), 1.02 * card)
    axes.margins(y=0.12)
    axes.set_xlabel("needed of a GPU, GiB")
    handles, goals = axes.get_legend_handles_labels()
    if goals:
        of_goal = dict(zip(goals, handles, strict=True))
        axes.legend(of_goal.values(), of_goal.keys(), loc="upper left")
