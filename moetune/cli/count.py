"""`moetune count`: print a model's parameter counts, from its configuration alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from moetune.cli import options as cli
from moetune.errors import UserError, counted
from moetune.report.view import Table, ViewSection

if TYPE_CHECKING:
    from moetune.models.parameter_count import ParameterCount


def count(
    model: Annotated[
        str | None, cli.argument(None, "Catalog name, local folder or hub id. Default: the model of --run.")
    ] = None,
    run: Annotated[Path | None, cli.option("RUN.yaml", "Also count what this run file would train.", "--run")] = None,
    set_: cli.Overrides = None,
    json_: cli.Json = False,
) -> None:
    """Count the parameters of a model: in all, per part, per expert, active for one token."""
    if run is None:
        if model is None:
            raise UserError("count needs a MODEL or --run")
        cli.refuse_set(set_, "give one with --run")
    with cli.heavy_imports():
        from moetune.adapt.count import count as count_parameters
        from moetune.report.run import trainable_table
        from moetune.run.dtypes import this_device
        from moetune.run.resolve import resolve

    if run is None:
        of_model = count_parameters(str(model))
    else:
        overrides = [*(set_ or ()), *([f"model.path={json.dumps(model)}"] if model else [])]
        of_model = count_parameters(resolve(cli.read_run(run, overrides), this_device()))
    parameters = of_model.parameter_count
    shown = [ViewSection(f"{of_model.model} ({parameters.model_type})", _components(parameters)), *_facts(parameters)]
    if of_model.trainable is not None:
        shown.append(ViewSection("trained by this run file", trainable_table(of_model.trainable, parameters.total)))
    cli.answer(json_, of_model.to_json(), *shown)


def _components(parameters: ParameterCount) -> Table:
    """Return a table with a row for each component of a model: parameters, share of all, active ones per token."""
    from moetune.report.units import percent

    rows = [
        (component, f"{numel:,}", percent(numel, parameters.total, 3), f"{parameters.active[component]:,}")
        for component, numel in parameters.components.items()
        if numel
    ]
    total = "total", f"{parameters.total:,}", "100.000 %", f"{parameters.active_per_token:,}"
    return Table(("part", ">parameters", ">share", ">active per token"), rows, [total])


def _facts(parameters: ParameterCount) -> Iterator[str]:
    """Yield sentences about what is not loaded and about the MoE layers: experts, experts per token, and their size."""
    if parameters.not_loaded:
        left_out = ", ".join(f"{path} {numel:,}" for path, numel in parameters.not_loaded.items())
        whole = parameters.total + sum(parameters.not_loaded.values())
        yield f"not loaded, because text does not reach it: {left_out}; the whole model has {whole:,} parameters"
    layers = len(parameters.layers)
    if parameters.num_moe_layers == 0:
        yield f"{counted(layers, 'layer')}, none with experts: every parameter is active for every token"
        return

    def per_layer(value: int | list[int] | None) -> str:
        return f"{min(value)} to {max(value)}" if isinstance(value, list) else str(value)

    yield (
        f"{parameters.num_moe_layers} of {layers} layers have experts: {per_layer(parameters.num_experts)} a layer, "
        f"{per_layer(parameters.top_k)} of them used by a token"
    )
    per_expert = f"{parameters.per_expert:,}" if isinstance(parameters.per_expert, int) else "differs by layer"
    yield f"one expert of one layer: {per_expert} parameters"
