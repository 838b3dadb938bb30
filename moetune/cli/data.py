"""`moetune data`: print how data are tokenized, and which tokens carry loss."""

from typing import Annotated

from moetune.cli import options as cli
from moetune.config.load import load_run_config, refuse_missing_files


def data(
    run: cli.RunFile,
    records: Annotated[int, cli.number("How many records to show.", 0, metavar="N")] = 3,
    html: cli.Page = None,
    set_: cli.Overrides = None,
    json_: cli.Json = False,
) -> None:
    """Show how a run's data are read: the first records as tokens, which tokens carry loss, lengths, steps an epoch."""
    config = load_run_config(run, set_ or ())
    refuse_missing_files(config, run)
    with cli.heavy_imports():
        from moetune.report.data import data_view
        from moetune.report.page import write_page
        from moetune.training.preview import preview

        name, previewed = preview(config, records)
    view = data_view(name, previewed)
    if html is not None:
        write_page(view, html)
    cli.answer(json_, previewed, view)
