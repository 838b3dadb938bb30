"""A run, read from its folder, as a view with charts: curves, memory, expert load, what trained, the run file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moetune.errors import counted
from moetune.report.charts import COLOURS, Chart
from moetune.report.units import gib, named, percent
from moetune.report.view import Section, Table, View

BLUE, ORANGE = COLOURS["frozen_weights"], COLOURS["gradients"]
Metrics = Sequence[Mapping[str, Any]]
Load = Mapping[Any, Sequence[float]]


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


def run_view(run: RunFacts) -> View:
    evaluations = [line for line in run.metrics if "eval_loss" in line]
    losses = [line["loss"] for line in run.metrics if line.get("loss") is not None]
    verdict = f"{max((line['step'] for line in run.metrics), default=0):,} of {counted(run.steps, 'step')}"
    if len(evaluations) > 1:
        verdict += f": held-out loss {evaluations[0]['eval_loss']:.4f} → {evaluations[-1]['eval_loss']:.4f}"
    elif losses:
        verdict += f": loss {losses[0]:.4f} → {losses[-1]:.4f}"
    lines = []
    if evaluations:
        best = min(evaluations, key=lambda line: line["eval_loss"])
        lines.append(f"best held-out loss {best['eval_loss']:.4f}, at step {best['step']:,}")
    if speeds := [line["tokens_per_second"] for line in run.metrics if line.get("tokens_per_second")]:
        lines.append(f"{sum(speeds) / len(speeds):,.0f} tokens a second on average")
    if skipped := sum(line.get("skipped_steps") or 0 for line in run.metrics):
        lines.append(f"{counted(skipped, 'step')} skipped: a gradient was not finite")
    return View(f"{run.name}: {run.model}", verdict, None, lines, sections=[*_sections(run)])


def _sections(run: RunFacts) -> Iterator[Section]:
    if run.drift is not None:
        yield drift_section(run.drift)
    memory = run.memory
    if memory is None:
        yield Section("memory", "Nothing has been measured yet.")
    else:
        measured = f"memory of the first {memory['steps']} steps, on {memory['device']}"
        yield Section(measured, memory_table(memory["predicted"], memory["measured"]))
    yield Section("what trains", trainable_table(run.trainable, run.parameters))
    yield Section("versions", ", ".join(f"{name} {version}" for name, version in run.versions.items()))
    yield Section("the resolved run file", run.run_file)


def memory_table(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> Table:
    """Set predicted bytes beside measured ones."""
    rows = []
    for key in ("peak_allocated", "peak_reserved"):
        before, after = predicted.get(key), measured.get(key)
        off = f"{100 * (before / after - 1):+.2f} %" if before and after else ""
        rows.append((named(key), *(gib(size) if size else "–" for size in (before, after)), off))
    return Table(("", ">predicted", ">measured", ">off by"), rows)


def trainable_table(trainable: Mapping[str, int], parameters: int) -> Table:
    rows = [(part, f"{count:,}", percent(count, parameters, 4)) for part, count in trainable.items() if count]
    total = [row for row in rows if row[0] == "total"]
    return Table(("part", ">parameters", ">of the model"), [row for row in rows if row not in total], total)


def drift_section(drift: Mapping[str, Any]) -> Section:
    """Describe drift.json, layer by layer."""
    rows = [
        (str(index), f"{layer['distance']:.3f}", percent(layer["changed"], 1), _ids(layer["died"]), _ids(layer["came"]))
        for index, layer in drift["layers"].items()
    ]
    headings = (">layer", ">Jensen-Shannon distance", ">tokens with other experts", "died", "came")
    title = f"routing of {drift['tokens']:,} tokens, before and after step {drift['step']}"
    return Section(title, Table(headings, rows))


def _ids(experts: Sequence[int]) -> str:
    return ", ".join(map(str, experts))


# --- Charts -------------------------------------------------------------------------------------------------------


def run_charts(run: RunFacts) -> Iterator[Chart]:
    yield Chart("curves", (10, 5.4), lambda figure: _draw_curves(figure, run.metrics))
    load = {} if run.memory is None else run.memory.get("expert_load") or {}
    if load:
        yield _heatmaps("tokens each expert received", {"": load})
    if run.drift is not None:
        yield drift_chart(run.drift)


def drift_chart(drift: Mapping[str, Any]) -> Chart:
    """Expert load before and after a run, from drift.json."""
    titles = {"before": "before", "after": f"after step {drift['step']}"}
    loads = {title: {n: one[key] for n, one in drift["layers"].items()} for key, title in titles.items()}
    return _heatmaps("what training did to routing", loads)


def _draw_curves(figure: Figure, metrics: Metrics) -> None:
    trained = [line for line in metrics if "lr" in line]
    titles = {
        "loss": "loss",
        "lr": "learning rate",
        "tokens_per_second": "tokens a second",
        "grad_norm": "norm of the gradient",
    }
    for axes, (key, title) in zip(figure.subplots(2, 2).flatten(), titles.items(), strict=True):
        _line(axes, trained, key, "training", BLUE)
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if key == "loss":
            _line(axes, metrics, "eval_loss", "held out", ORANGE)
            axes.legend()
        else:
            axes.set_ylim(0, 1.1 * axes.get_ylim()[1])


def _line(axes: Axes, lines: Metrics, key: str, label: str, colour: str) -> None:
    points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    marker = "." if len(points) < 30 else None
    axes.plot([x for x, _ in points], [y for _, y in points], color=colour, label=label, marker=marker)


def _heatmaps(title: str, loads: Mapping[str, Load]) -> Chart:
    """Draw each layer's expert load, as multiples of an even share, on one scale."""
    layers = [*next(iter(loads.values()))]
    widest = max(len(row) for load in loads.values() for row in load.values())

    def draw(figure: Figure) -> None:
        shares = {
            name: [
                [count * len(row) / max(sum(row), 1) for count in row] + [float("nan")] * (widest - len(row))
                for row in load.values()
            ]
            for name, load in loads.items()
        }
        most = max(value for rows in shares.values() for row in rows for value in row if value == value)
        grid = figure.subplots(1, len(loads), squeeze=False, sharey=True)[0]
        for axes, (name, rows) in zip(grid, shares.items(), strict=True):
            mesh = axes.pcolormesh(rows, cmap="cividis", vmin=0, vmax=most)
            axes.set_title(name)
            axes.set_xlabel("expert")
        shown = range(0, len(layers), -(-len(layers) // 12))
        grid[0].set_yticks([number + 0.5 for number in shown], [f"layer {layers[number]}" for number in shown])
        grid[0].invert_yaxis()
        figure.colorbar(mesh, ax=grid, label="times an even share")

    return Chart(title, (10, 1.5 + min(0.3 * len(layers), 6)), draw)
