"""`moetune models`: what the catalog knows."""

from __future__ import annotations

from moetune.cli.options import Json


def models(json_: Json = False) -> None:
    """List the models that can be named without a network, with their published parameter counts."""
    from moetune.models.catalog import find_model, model_names

    entries = [entry for name in model_names() if (entry := find_model(name)) is not None]
    if json_:
        import json

        rows = [
            {
                "name": entry.name,
                "hub_id": entry.hub_id,
                "license": entry.license,
                "model_type": entry.config["model_type"],
                "published_total": entry.published["total"],
                "embedded_weights": entry.folder is not None,
            }
            for entry in entries
        ]
        print(json.dumps({"schema": 1, "models": rows}, indent=2))
        return

    from rich.table import Table

    from moetune.report.console import terminal

    table = Table()
    table.add_column("name", no_wrap=True)
    table.add_column("parameters, published", justify="right", no_wrap=True)
    table.add_column("weights", overflow="fold")
    for entry in entries:
        weights = "embedded" if entry.folder is not None else entry.hub_id or "none"
        table.add_row(entry.name, f"{entry.published['total']:,}", weights)
    terminal().print(table)
