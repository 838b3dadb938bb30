"""A run as one HTML file that asks for nothing outside itself: curves, memory, expert load, what trained, run file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moetune.errors import counted
from moetune.files import write_output
from moetune.memory.report import MemoryReport
from moetune.report.figures import COLOURS, INK, PAPER, inline_svg, rendered, style
from moetune.report.page import render

BLUE, ORANGE = COLOURS["frozen_weights"], COLOURS["gradients"]
Metrics = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RunFacts:
    """What a run folder holds, read.

    Attributes:
        metrics: lines of metrics.jsonl.
        memory: memory.json; None before two steps.
        drift: drift.json; None unless `moetune drift` was run.
        parameters: of the whole model.
    """

    name: str
    model: str
    steps: int
    metrics: Metrics
    memory: Mapping[str, Any] | None
    trainable: Mapping[str, int]
    parameters: int
    versions: Mapping[str, str]
    run_file: str
    drift: Mapping[str, Any] | None = None

    @property
    def headline(self) -> str:
        """How far it is, and what became of the loss."""
        done = max((line["step"] for line in self.metrics), default=0)
        held_out = [line["eval_loss"] for line in self.metrics if "eval_loss" in line]
        losses = [line["loss"] for line in self.metrics if line.get("loss") is not None]
        what = ""
        if len(held_out) > 1:
            what = f": held-out loss {held_out[0]:.4f} → {held_out[-1]:.4f}"
        elif losses:
            what = f": loss {losses[0]:.4f} → {losses[-1]:.4f}"
        return f"{done:,} of {counted(self.steps, 'step')}{what}"

    @property
    def lines(self) -> list[str]:
        """What else a person asks first."""
        found = [line for line in self.metrics if "eval_loss" in line]
        speeds = [line["tokens_per_second"] for line in self.metrics if line.get("tokens_per_second")]
        said = []
        if found:
            best = min(found, key=lambda line: line["eval_loss"])
            said.append(f"best held-out loss {best['eval_loss']:.4f}, at step {best['step']:,}")
        if speeds:
            said.append(f"{sum(speeds) / len(speeds):,.0f} tokens a second on average")
        if skipped := sum(line.get("skipped_steps") or 0 for line in self.metrics):
            said.append(f"{counted(skipped, 'step')} skipped: a gradient was not finite")
        return said


def write_run_page(facts: RunFacts, path: Path, step: MemoryReport | None = None, refresh: int | None = None) -> None:
    """Writes the page, whole or not at all.

    Args:
        step: one step of the run as it was predicted, for its timeline.
        refresh: seconds after which a browser reads it again.

    Raises:
        UserError: the file cannot be written.
    """
    figures = [("Curves", _svg(lambda figure: _curves(figure, facts.metrics), (10, 5.4)))]
    load = {} if facts.memory is None else facts.memory.get("expert_load") or {}
    if load:
        height = 1.2 + min(0.25 * len(load), 6)
        figures.append(("Tokens each expert received", _svg(lambda figure: _load(figure, load), (10, height))))
    if facts.drift is not None:
        height = 1.4 + min(0.25 * len(facts.drift["layers"]), 6)
        drift = facts.drift
        figures.append(("What training did to routing", _svg(lambda figure: draw_drift(figure, drift), (10, height))))
    if step is not None:
        name = "" if step.gpu is None else f" for {step.gpu.name}"
        figures.append((f"Memory of a step, predicted{name}", _themed(inline_svg(step)[0])))
    write_output(path, render("run.html.j2", run=facts, figures=figures, refresh=refresh).encode())


def _svg(draw: Callable[[Figure], None], size: tuple[float, float]) -> str:
    with style():
        figure = Figure(figsize=size, layout="constrained", facecolor=PAPER)
        draw(figure)
        svg = rendered(figure, "svg").decode()
    return _themed(svg[svg.index("<svg") :])


def _themed(svg: str) -> str:
    """In the page's own colours, so that charts follow a dark theme."""
    return svg.replace(INK, "var(--ink)").replace(PAPER, "var(--paper)")


def _curves(figure: Figure, metrics: Metrics) -> None:
    axes = figure.subplots(2, 2).flatten()
    trained = [line for line in metrics if "lr" in line]
    _line(axes[0], trained, "loss", "training")
    _line(axes[0], [line for line in metrics if "eval_loss" in line], "eval_loss", "held out", ORANGE, marker="o")
    axes[0].legend(frameon=False)
    for one, key, title in zip(
        axes,
        ("loss", "lr", "tokens_per_second", "grad_norm"),
        ("loss", "learning rate", "tokens a second", "norm of the gradient"),
        strict=True,
    ):
        one.set_title(title, loc="left", fontsize=9)
        one.set_xlabel("step")
        one.spines[["top", "right"]].set_visible(False)
        if one is not axes[0]:
            _line(one, trained, key, title)
            one.set_ylim(0, 1.1 * one.get_ylim()[1])
        one.xaxis.set_major_locator(MaxNLocator(integer=True))


def _line(axes: Axes, lines: Metrics, key: str, label: str, colour: str = BLUE, marker: str | None = None) -> None:
    points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    few = marker or ("." if len(points) < 30 else None)
    axes.plot([x for x, _ in points], [y for _, y in points], color=colour, label=label, marker=few, markersize=4)


def _load(figure: Figure, load: Mapping[str, Sequence[float]]) -> None:
    _heatmaps(figure, {"": load})


def draw_drift(figure: Figure, drift: Mapping[str, Any]) -> None:
    """Loads before and after, of what `moetune drift` found."""
    layers: Mapping[str, Any] = drift["layers"]
    titles = {"before": "before", "after": f"after step {drift['step']}"}
    _heatmaps(figure, {title: {n: layer[key] for n, layer in layers.items()} for key, title in titles.items()})


def _heatmaps(figure: Figure, loads: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Each layer's share by expert, against an even one; on one scale, by their titles."""
    widest = max(len(row) for load in loads.values() for row in load.values())
    shares = {
        title: [
            [count * len(row) / max(sum(row), 1) for count in row] + [float("nan")] * (widest - len(row))
            for row in load.values()
        ]
        for title, load in loads.items()
    }
    most = max(value for rows in shares.values() for row in rows for value in row if value == value)
    axes = figure.subplots(1, len(loads), squeeze=False, sharey=True)[0]
    for one, (title, rows) in zip(axes, shares.items(), strict=True):
        mesh = one.pcolormesh(rows, cmap="cividis", vmin=0, vmax=most)
        one.set_title(title, loc="left", fontsize=9)
        one.set_xlabel("expert")
    names, shown = [*next(iter(loads.values()))], range(0, len(rows), -(-len(rows) // 12))
    axes[0].set_yticks([number + 0.5 for number in shown], [f"layer {names[number]}" for number in shown])
    axes[0].invert_yaxis()
    figure.colorbar(mesh, ax=axes, label="times an even share")
