"""The command `moetune verify`: take real steps on this machine, and print measured beside predicted memory."""

from typing import Annotated

from moetune.cli.options import Json, Overrides, RunFile, answer, heavy_imports, number, option, read_run
from moetune.report.view import ViewSection


def verify(
    run: RunFile,
    steps: Annotated[int, number("Optimizer steps; the first creates the states.", 2, 10_000)] = 3,
    routing: Annotated[
        str, option("measured|balanced|skew:S|worst|FILE", "Tokens per expert that the prediction assumes.")
    ] = "measured",
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Take real steps with random weights; print predicted beside measured memory. Exit code 1: more than 5 % apart."""
    config = read_run(run, set_)
    with heavy_imports():
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
    answer(json_, outcome.to_json(), section, speed, fails=not outcome.holds)
