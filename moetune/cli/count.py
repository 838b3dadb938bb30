"""`moetune count`: the parameter counter, from a configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moetune.cli.imports import heavy_imports
from moetune.cli.options import Json, Overrides, read_run

if TYPE_CHECKING:
    from rich.table import Table

    from moetune.models.parameter_count import ParameterCount


def count(
    model: Annotated[
        str | None,
        typer.Argument(help="Catalog name, local folder or hub id. Default: the model of --run.", show_default=False),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN.yaml", help="Also count what this run file would train."),
    ] = None,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Count the parameters of a model: in all, per part, per expert, active for one token."""
    from moetune.errors import UserError

    if run is None and (model is None or set_):
        raise UserError(
            "count needs a MODEL or --run" if model is None else "--set changes a run file; give one with --run"
        )

    import json

    with heavy_imports():
        from moetune.adapt.count import count as count_parameters
        from moetune.run.dtypes import this_device
        from moetune.run.resolve import resolve

    if run is not None:
        overrides = list(set_ or ())
        config = read_run(run, [*overrides, f"model.path={json.dumps(model)}"] if model else overrides)
        found = count_parameters(resolve(config, this_device()))
    else:
        assert model is not None
        found = count_parameters(model)
    if json_:
        print(json.dumps(found.to_json(), indent=2))
        return

    from moetune.report.console import terminal

    console = terminal()
    console.print(_components_table(found.model, found.parameter_count))
    for line in _facts(found.parameter_count):
        console.print(line, highlight=False)
    if found.trainable is not None:
        console.print(_trainable_table(found.trainable, found.parameter_count.total))


def _components_table(model: str, parameters: ParameterCount) -> Table:
    from rich.table import Table

    table = Table(title=f"{model} ({parameters.model_type})", title_justify="left", show_footer=True)
    table.add_column("part", footer="total")
    table.add_column("parameters", footer=f"{parameters.total:,}", justify="right")
    table.add_column("share", footer="100.000 %", justify="right")
    table.add_column("active per token", footer=f"{parameters.active_per_token:,}", justify="right")
    for component, numel in parameters.components.items():
        if numel:
            share = f"{100 * numel / parameters.total:.3f} %"
            table.add_row(component, f"{numel:,}", share, f"{parameters.active[component]:,}")
    return table


def _facts(parameters: ParameterCount) -> list[str]:
    from moetune.errors import counted

    if parameters.num_moe_layers == 0:
        return [
            f"{counted(len(parameters.layers), 'layer')}, none with experts: every parameter is active for every token"
        ]
    per_expert = f"{parameters.per_expert:,}" if isinstance(parameters.per_expert, int) else "differs by layer"
    per_layer, top_k = _per_layer(parameters.num_experts), _per_layer(parameters.top_k)
    return [
        f"{parameters.num_moe_layers} of {len(parameters.layers)} layers have experts: {per_layer} a layer, "
        f"{top_k} of them used by a token",
        f"one expert of one layer: {per_expert} parameters",
    ]


def _per_layer(value: int | list[int] | None) -> str:
    return f"{min(value)} to {max(value)}" if isinstance(value, list) else str(value)


def _trainable_table(trainable: dict[str, int], total: int) -> Table:
    from rich.table import Table

    table = Table(title="trained by this run file", title_justify="left", show_footer=True)
    table.add_column("part", footer="total")
    table.add_column("parameters", footer=f"{trainable['total']:,}", justify="right")
    table.add_column("of the model", footer=f"{100 * trainable['total'] / total:.4f} %", justify="right")
    for part, numel in trainable.items():
        if numel and part != "total":
            table.add_row(part, f"{numel:,}", f"{100 * numel / total:.4f} %")
    return table
