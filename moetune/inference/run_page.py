"""`moetune report`: a run's HTML page: curves, memory, expert load, what trained, the run file."""

from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moetune.adapt.count import count
from moetune.errors import counted, note
from moetune.exporting.finished_run import read_own_config, refuse_changed_model
from moetune.json_files import read_json
from moetune.report.charts import COLOURS, Chart
from moetune.report.run import drift_chart, drift_section, heatmaps, memory_table, trainable_table
from moetune.report.view import View, ViewSection
from moetune.run.dtypes import this_device
from moetune.run.folder_files import Drift, MemoryFile
from moetune.run.resolve import ResolvedRun, resolve
from moetune.training.folder.run_folder import DRIFT_FILE, MEMORY_FILE, RUN_FILE, RunFolder

_PACKAGES = ("moetune", "torch", "transformers", "peft", "bitsandbytes", "datasets")
Metrics = Sequence[Mapping[str, Any]]
"""The lines of `metrics.jsonl`."""


def run_of(path: Path) -> ResolvedRun:
    """Resolve the run file in the run folder `path` for this machine, and print notes about changed model files.

    Raises:
        UserError: `path` is no run folder, or its model is missing or has changed.
    """
    run = resolve(read_own_config(path), this_device())
    note(*refuse_changed_model(RunFolder(path), run.model))
    return run


def run_page(path: Path, run: ResolvedRun) -> tuple[View, list[Chart]]:
    """Return the content of a run's page, from what the run folder `path` holds now: a view, and charts.

    `run` is from `run_of`, which need not be called again while the run goes on.

    Raises:
        UserError: `memory.json` or `drift.json` is damaged.
    """
    metrics = RunFolder(path).metrics()
    memory: Any = None
    if (path / MEMORY_FILE).is_file():
        memory = read_json(path / MEMORY_FILE, MemoryFile, remedy="delete it, and the page goes without")
    drift: Drift | None = None
    if (path / DRIFT_FILE).is_file():
        drift = read_json(path / DRIFT_FILE, Drift, remedy="write it again with moetune drift")
    verdict, *lines = _words(metrics, run.config.train.steps)
    sections = [*_sections(path, run, memory), *([] if drift is None else [drift_section(drift)])]
    charts = [Chart("curves", (10, 5.4), lambda figure: _draw_curves(figure, metrics))]
    if memory is not None and memory.get("expert_load"):
        charts.append(heatmaps("tokens each expert received", {"": memory["expert_load"]}))
    if drift is not None:
        charts.append(drift_chart(drift))
    return View(f"{path.resolve().name}: {run.config.model.path}", verdict, None, lines, sections=sections), charts


def _words(metrics: Metrics, steps: int) -> Iterator[str]:
    """Yield the headline and the summary lines: steps done of the run's `steps`, losses, speed, skipped steps."""
    evaluations = [line for line in metrics if line.get("eval_loss") is not None]
    losses = [line["loss"] for line in metrics if line.get("loss") is not None]
    done = f"{max((line['step'] for line in metrics), default=0):,} of {counted(steps, 'step')}"
    if len(evaluations) > 1:
        yield f"{done}: held-out loss {evaluations[0]['eval_loss']:.4f} → {evaluations[-1]['eval_loss']:.4f}"
    else:
        yield f"{done}: loss {losses[0]:.4f} → {losses[-1]:.4f}" if losses else done
    if evaluations:
        best = min(evaluations, key=lambda line: line["eval_loss"])
        yield f"best held-out loss {best['eval_loss']:.4f}, at step {best['step']:,}"
    if speeds := [line["tokens_per_second"] for line in metrics if line.get("tokens_per_second")]:
        yield f"{sum(speeds) / len(speeds):,.0f} tokens a second on average"
    if skipped := sum(line.get("skipped_steps") or 0 for line in metrics):
        yield f"{counted(skipped, 'step')} skipped: a gradient was not finite"


def _sections(path: Path, run: ResolvedRun, memory: Any) -> Iterator[ViewSection]:
    """Yield the sections of the page: memory (the content of `memory.json`, None if there is none yet), trained
    parameters, package versions, run file."""
    if memory is None:
        yield ViewSection("memory", "Nothing has been measured yet.")
    else:
        measured = f"memory of the first {counted(memory['steps'], 'step')}, on {memory['device']}"
        yield ViewSection(measured, memory_table(memory["predicted"], memory["measured"]))
    parameters = count(run)
    assert parameters.trainable is not None
    yield ViewSection("what trains", trainable_table(parameters.trainable, parameters.parameter_count.total))
    yield ViewSection("versions", ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES))
    yield ViewSection("the resolved run file", (path / RUN_FILE).read_text(encoding="utf-8"))


def _draw_curves(figure: Figure, metrics: Metrics) -> None:
    """Draw loss, learning rate, tokens/s and gradient norm over the steps."""
    trained = [line for line in metrics if "lr" in line]
    keys = ("loss", "loss"), ("lr", "learning rate"), ("tokens_per_second", "tokens/s"), ("grad_norm", "gradient norm")
    for axes, (key, title) in zip(figure.subplots(2, 2).flatten(), keys, strict=True):
        _line(axes, trained, key, "training", COLOURS["frozen_weights"])
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if key == "loss":
            _line(axes, metrics, "eval_loss", "held out", COLOURS["gradients"])
            axes.legend()
        else:
            axes.set_ylim(0, 1.1 * axes.get_ylim()[1])


def _line(axes: Axes, lines: Metrics, key: str, label: str, colour: str) -> None:
    """Draw one metric over the steps that have it; with markers if there are fewer than 30 points."""
    points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    marker = "." if len(points) < 30 else None
    axes.plot([x for x, _ in points], [y for _, y in points], color=colour, label=label, marker=marker)
