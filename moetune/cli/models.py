"""`moetune models`: list the catalog's models, with their published parameter counts."""

from moetune.cli import options as cli
from moetune.report.view import Table


def models(json_: cli.Json = False) -> None:
    """List the models in the catalog, usable without a network, with their published parameter counts."""
    from moetune.models.catalog import find_model, model_names

    entries = [entry for name in model_names() if (entry := find_model(name)) is not None]
    described = [
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
    rows = [
        (
            entry.name,
            f"{entry.published['total']:,}",
            "embedded" if entry.folder is not None else entry.hub_id or "none",
        )
        for entry in entries
    ]
    table = Table(("name", ">parameters", "weights"), rows)
    cli.answer(json_, {"models": described}, table)
