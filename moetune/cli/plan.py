"""`moetune plan`: what fits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moetune.cli.imports import heavy_imports
from moetune.cli.options import Json, Overrides, Page, Picture, Tokens, read_run
from moetune.config.fields import LARGEST

if TYPE_CHECKING:
    from rich.console import Console

    from moetune.memory.report import MemoryReport
    from moetune.planning.solve import Solved


def plan(
    what: Annotated[
        str, typer.Argument(metavar="MODEL|RUN.yaml", help="A model to plan for, or a run file.", show_default=False)
    ],
    solve: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Of a run file: find the largest value of this setting that fits."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="A GPU such as l40s, or a size such as 44GiB. Default: hardware.gpu.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=LARGEST, help="How many of them.")] = 1,
    goal: Annotated[str, typer.Option(metavar="router|experts|lora|any", help="What shall train.")] = "any",
    host: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Host memory that a run may take. Default: any.")
    ] = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help="What the run files train on.")] = None,
    tokens: Tokens = None,
    min_sequence: Annotated[int, typer.Option(min=2, max=2**24, help="Tokens of a sequence.")] = 1024,
    explain: Annotated[bool, typer.Option("--explain", help="Say why no more of each fits.")] = False,
    write: Annotated[Path | None, typer.Option(metavar="DIR", help="Leave each as a run file in this folder.")] = None,
    html: Page = None,
    figure: Picture = None,
    routing: Annotated[
        str, typer.Option(metavar="balanced|skew:S|worst|FILE", help="With --solve: tokens of each expert.")
    ] = "balanced",
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Find what fits a card: the most of each way to train a MODEL, or the largest value of a setting of a RUN.yaml.
    Exit code 1: nothing does."""
    import json
    import sys
    from dataclasses import replace

    from rich.text import Text

    from moetune.errors import UserError
    from moetune.report.console import terminal

    chosen: Any = ("router", "experts", "lora") if goal == "any" else (goal,)
    if goal not in ("router", "experts", "lora", "any"):
        raise UserError(f"--goal {goal!r}: it is router, experts, lora or any")
    is_file = Path(what).suffix in (".yaml", ".yml")
    if is_file != (solve is not None):
        raise UserError(
            f"{what!r} is a run file: give --solve KEY, or a model to plan for"
            if is_file
            else f"--solve changes a run file, and {what!r} is none"
        )
    if solve is not None and (html or figure or write or tokens):
        raise UserError("--html, --figure, --write and --tokens are of a plan for a model; --solve finds one value")
    quiet: Any = terminal(stderr=True)
    if solve is not None:
        with heavy_imports():
            from moetune.memory.routing import parse_routing
            from moetune.planning.predictor import Predictor
            from moetune.planning.solve import solve as solve_for

        config = read_run(what, set_)
        with quiet.status(Text(f"looking for the largest {solve}")):
            solved = solve_for(config, solve, Predictor(gpu, parse_routing(routing)))
        if json_:
            print(json.dumps(solved.to_json(), indent=2))
        else:
            _print_solved(solved, terminal())
        if solved.report is None:
            raise typer.Exit(1)
        return

    if gpu is None:
        raise UserError("plan needs a card: --gpu l40s, or a size such as --gpu 44GiB")
    if set_:
        raise UserError("--set changes a run file; a plan chooses settings itself")
    from moetune.config.load import refuse_missing
    from moetune.config.sizes import HOW_TO_WRITE_A_SIZE, parse_size

    most = None if host is None else parse_size(host)
    if host is not None and most is None:
        raise UserError(f"--host {host!r} is no size. {HOW_TO_WRITE_A_SIZE}")
    with heavy_imports():
        import torch

        from moetune.planning.figure import save_figure, write_page
        from moetune.planning.files import write_runs
        from moetune.planning.plan import plan as plan_for
        from moetune.planning.tables import plan_tables
        from moetune.report.figures import refuse_unknown_format

    if figure is not None:
        refuse_unknown_format(figure)
    if data is not None:
        refuse_missing([data])
    why: tuple[str, ...] = ()
    if data is not None:
        from moetune.training.data.sources import looks_like_a_file, open_sources

        if looks_like_a_file(data) or "/" not in data:  # a data set of the hub may be out of reach here
            open_sources(data)
    if data is not None and tokens is None:
        tokens, why = _tokens_of(data, what, min_sequence)
    with quiet.status(Text("planning")) as status:
        found = plan_for(
            what,
            gpu,
            goals=chosen,
            count=count,
            length=min_sequence,
            host=most,
            data=data,
            tokens=tokens,
            processes=min(4, torch.get_num_threads()),
            say=lambda words: status.update(Text(words)),
        )
    found = replace(found, notes=(*found.notes, *why))
    written = [] if write is None else write_runs(found, write)
    for file, draw in ((html, write_page), (figure, save_figure)):
        if file is not None:
            draw(found, file)
            print(f"{file} written", file=sys.stderr)
    if json_:
        print(json.dumps({**found.to_json(), "files": [str(file) for file in written]}, indent=2))
    else:
        for table in plan_tables(found, explain=explain):
            terminal().print(table, highlight=False)
        for file in written:
            print(f"{file} written")
    if not found.candidates:
        raise typer.Exit(1)


def _tokens_of(data: str, model: str, length: int) -> tuple[int | None, tuple[str, ...]]:
    """The tokens of data, as training would read them; or why they are not known."""
    from moetune.errors import UserError, one_line

    with heavy_imports():
        from moetune.config.load import read_run_config
        from moetune.training.data.preview import preview

    run = {"model": {"path": model}, "adapt": {}, "train": {"sequence_length": length}, "data": {"train": data}}
    try:
        return preview(read_run_config(run, (), f"a run on {data}")).counts.tokens, ()
    except UserError as error:
        return None, (f"no hours for {data!r}, whose tokens could not be counted ({one_line(error)}); give --tokens",)


def _print_solved(solved: Solved, console: Console) -> None:
    from moetune.report.units import gib

    def said(report: MemoryReport) -> str:
        assert report.headroom_bytes is not None
        left = report.headroom_bytes
        return f"needs {gib(report.required)}, {gib(abs(left))} {'left' if left >= 0 else 'too much'}"

    axis = solved.axis
    if solved.report is None:
        assert solved.next_report is not None
        line = f"no {axis.key} fits: even {axis.name(solved.next_value)} {said(solved.next_report)}"
        console.print(line, style="bold red", highlight=False)
        return
    style = "bold green" if solved.report.verdict == "yes" else "bold yellow"
    console.print(f"{axis.key}: {axis.name(solved.value)} {said(solved.report)}", style=style, highlight=False)
    if solved.next_report is None:
        console.print("there is no value beyond it", highlight=False)
    else:
        console.print(f"one further, {axis.name(solved.next_value)}, {said(solved.next_report)}", highlight=False)
    console.print(f"--set {solved.settings[0]}", highlight=False)
