"""Tables and charts of a run: memory, trained parameters, expert load, routing drift."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from moetune.report.charts import Chart
from moetune.report.units import gib, named, percent
from moetune.report.view import Table, ViewSection
from moetune.run.folder_files import Drift

Load = Mapping[Any, Sequence[float]]
"""Layer -> load of each expert of the layer."""


def memory_table(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> Table:
    """Return a table of `peak_allocated` and `peak_reserved`: predicted bytes, measured bytes, and their difference in
    percent of the measured ones. A key that is missing or None is shown as a dash."""
    rows = []
    for key in ("peak_allocated", "peak_reserved"):
        before, after = predicted.get(key), measured.get(key)
        off = f"{100 * (before / after - 1):+.2f} %" if before and after else ""
        rows.append((named(key), *(gib(size) if size else "–" for size in (before, after)), off))
    return Table(("", ">predicted", ">measured", ">off by"), rows)


def trainable_table(trainable: Mapping[str, int], parameters: int) -> Table:
    """Return a table of trained parameters and their share of all `parameters`, from part -> number; the number under
    the key `total` becomes the last row, and parts without parameters are left out."""
    rows = [(part, f"{count:,}", percent(count, parameters, 4)) for part, count in trainable.items() if count]
    total = [row for row in rows if row[0] == "total"]
    return Table(("part", ">parameters", ">of the model"), [row for row in rows if row not in total], total)


def drift_section(drift: Drift) -> ViewSection:
    """Return a section with a table of how routing changed in each layer: distance of the loads, share of tokens with
    other experts, and ids of the experts that receive no token any more, or first do."""
    rows = [
        (str(index), f"{layer.distance:.3f}", percent(layer.changed, 1), _ids(layer.died), _ids(layer.came))
        for index, layer in drift.layers.items()
    ]
    headings = (">layer", ">Jensen-Shannon distance", ">tokens with other experts", "died", "came")
    title = f"routing of {drift.tokens:,} tokens, before and after step {drift.step}"
    return ViewSection(title, Table(headings, rows))


def _ids(experts: Sequence[int]) -> str:
    return ", ".join(map(str, experts))


def drift_chart(drift: Drift) -> Chart:
    """Return heat maps of expert load before and after a run."""
    before = {index: layer.before for index, layer in drift.layers.items()}
    loads = {"before": before, f"after step {drift.step}": {n: layer.after for n, layer in drift.layers.items()}}
    return heatmaps("what training did to routing", loads)


def heatmaps(title: str, loads: Mapping[str, Load]) -> Chart:
    """Return heat maps of expert load, layers by experts, side by side on one colour scale (1 = an even share).

    `loads` is title -> layer -> tokens of each expert, on any scale; all have the same layers.
    """
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
