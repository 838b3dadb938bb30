"""The command `moetune verify`: take real steps on this machine, and print measured beside predicted memory."""

from pathlib import Path
from typing import Annotated

from moetune.cli.options import Json, Overrides, RunFile, answer, heavy_imports, number, option, output_file, read_run
from moetune.report.console import note
from moetune.report.view import ViewSection


def verify(
    run: RunFile,
    steps: Annotated[int, number("Optimizer steps; the first creates the states.", 2, 10_000)] = 3,
    routing: Annotated[
        str, option("measured|balanced|skew:S|worst|FILE", "Tokens per expert that the prediction assumes.")
    ] = "measured",
    profile: Annotated[
        Path | None,
        option("FILE", "Also profile a step: its time by part, and a trace for chrome://tracing.", check=output_file),
    ] = None,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Take real steps with random weights; print predicted beside measured memory. Exit code 1: more than 5 % apart."""
    config = read_run(run, set_)
    with heavy_imports():
        from moetune.memory.assumed_routing import parse_routing
        from moetune.memory.measurement.profile import profile_step
        from moetune.planning.verify import verify as verify_run
        from moetune.report.profile import profile_sections
        from moetune.report.run import memory_table
        from moetune.run.dtypes import this_device
        from moetune.run.resolve import resolve

    resolved = resolve(config, this_device())
    outcome = verify_run(resolved, steps, None if routing == "measured" else parse_routing(routing))
    found = outcome.to_json()
    table = memory_table(outcome.predicted, outcome.measured)
    speed = f"{outcome.tokens_per_second:,.0f} tokens/s; routing: {outcome.routing}"
    shown: list[ViewSection | str] = [ViewSection(f"{config.model.path} on {outcome.device}", table), speed]
    if profile is not None:
        profiled = profile_step(resolved, resolved.device(None), profile)
        note(f"{profile} written")
        found["profile"] = profiled.to_json()
        shown += profile_sections(profiled)
    answer(json_, found, *shown, fails=not outcome.holds)
