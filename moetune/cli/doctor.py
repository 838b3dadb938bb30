"""`moetune doctor`: print whether this machine can train, and the remedies."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from moetune.cli import options as cli


def doctor(
    run: Annotated[Path | None, cli.argument("[RUN.yaml]", "Also check what this run needs.")] = None,
    set_: cli.Overrides = None,
    json_: cli.Json = False,
) -> None:
    """Check this machine, or a run on it, and print how to fix what is wrong. Exit code 1: a run would fail."""
    if run is None:
        cli.refuse_set(set_, "give one")
    with cli.heavy_imports():
        from rich.text import Text

        from moetune.config.load import load_run_config
        from moetune.planning.doctor import examine_machine, examine_run

    checks = [*examine_machine(), *(() if run is None else examine_run(load_run_config(run, set_ or ())))]
    is_well = all(check.outcome != "problem" for check in checks)
    colours = {"ok": "green", "note": "yellow", "problem": "bold red"}
    shown = []
    for check in checks:
        shown.append(Text(f"{check.outcome:8}{check.name}: {check.found}", colours[check.outcome]))
        if check.remedy:
            shown.append(Text(f"        {check.remedy}"))
    shown.append(Text("a run can start" if is_well else "a run would fail", "bold"))
    result = {"is_well": is_well, "checks": [asdict(check) for check in checks]}
    cli.answer(json_, result, *shown, fails=not is_well)
