"""`moetune verify`: take real steps, print measured beside predicted memory."""

from typing import Annotated

from moetune.cli import options as cli
from moetune.report.view import ViewSection


def verify(
    run: cli.RunFile,
    steps: Annotated[int, cli.number("Optimizer steps; the first creates the states.", 2, 10_000)] = 3,
    routing: Annotated[
        str, cli.option("measured|balanced|skew:S|worst|FILE", "Tokens per expert that the prediction assumes.")
    ] = "measured",
    set_: cli.Overrides = None,
    json_: cli.Json = False,
) -> None:
    """Take real steps with random weights; print predicted beside measured memory. Exit code 1: more than 5 % apart."""
    config = cli.read_run(run, set_)
    with cli.heavy_imports():
        from moetune.memory.assumed_routing import parse_routing
        from moetune.planning.verify import verify as verify_run
        from moetune.report.run import memory_table
        from moetune.run.dtypes import this_device
        from moetune.run.resolve import resolve

    resolved = resolve(config, this_device())
    outcome = verify_run(resolved, steps, None if routing == "measured" else parse_routing(routing))
    table = memory_table(outcome.predicted, outcome.measured)
    speed = f"{outcome.tokens_per_second:,.0f} tokens/s; routing: {outcome.routing}"
    section = ViewSection(f"{config.model.path} on {outcome.device}", table)
    cli.answer(json_, outcome.to_json(), section, speed, fails=not outcome.holds)
