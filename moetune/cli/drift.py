"""`moetune drift`: print how training changed the routing of held-out data."""

from typing import Annotated

from moetune.cli import options as cli


def drift(
    run: cli.RunFolder,
    data: Annotated[str | None, cli.option("FILE", "Data to route. Default: the run's held-out data.")] = None,
    tokens: cli.Scored = 131_072,
    figure: cli.Picture = None,
    json_: cli.Json = False,
) -> None:
    """Compare the routing of held-out data before and after a run: loads, changed choices, experts now unused."""
    with cli.heavy_imports():
        from moetune.report.run import drift_chart, drift_section
        from moetune.routing.drift import drift as drift_of
        from moetune.routing.drift import write_drift

    drifted = drift_of(run, data, tokens)
    write_drift(drifted, run)
    if figure is not None:
        drift_chart(drifted).save(figure)
    changed = f"{100 * drifted.changed:.1f} % of the tokens have other experts in some layer"
    cli.answer(json_, drifted.to_json(), drift_section(drifted), changed)
