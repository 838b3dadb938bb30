"""`moetune plan`: print the largest runs that fit, or a setting's largest value."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moetune.cli import options as cli
from moetune.errors import UserError, note, one_line, shown
from moetune.report.console import terminal
from moetune.report.view import View

if TYPE_CHECKING:
    from moetune.memory.report import MemoryReport
    from moetune.planning.candidate import Candidate
    from moetune.planning.solve import Solved


def plan(
    context: typer.Context,
    what: Annotated[str, cli.argument("MODEL|RUN.yaml", "A model to plan for, or a run file.")],
    solve: Annotated[
        str | None, cli.option("KEY", "For a run file: find the largest value of this setting that fits.")
    ] = None,
    gpu: cli.Card = None,
    count: Annotated[int, cli.number("Number of GPUs.")] = 1,
    goal: Annotated[str, cli.choice("router|experts|lora|any", "What to train.")] = "any",
    host: Annotated[str | None, cli.option("SIZE", "Most host memory of a run. Default: no limit.")] = None,
    data: Annotated[str | None, cli.option("FILE", "Training data of the run files.")] = None,
    tokens: cli.Tokens = None,
    min_sequence: Annotated[int, cli.number("Tokens of a sequence.", 2, 2**24)] = 1024,
    tight: cli.Tight = False,
    all_: Annotated[bool, cli.flag("--all", "Print every way that fits, not the most useful of each goal.")] = False,
    explain: Annotated[bool, cli.flag("--explain", "Also show what the next larger runs would risk.")] = False,
    write: Annotated[Path | None, cli.option("DIR", "Write each candidate as a run file to DIR.")] = None,
    html: cli.Page = None,
    figure: cli.Picture = None,
    routing: cli.Routed = None,
    trainer: cli.Trainer = None,
    trl: cli.TrlSettings = None,
    set_: cli.Overrides = None,
    json_: cli.Json = False,
) -> None:
    """Find what fits a card: the largest run of a MODEL by each strategy, or the largest value of a setting of a
    RUN.yaml. Exit code 1: nothing fits."""
    from rich.text import Text

    is_file = Path(what).suffix in (".yaml", ".yml")
    if is_file != (solve is not None):
        raise UserError(
            f"{what!r} is a run file: give --solve KEY, or a model to plan for"
            if is_file
            else f"--solve changes a run file, and {what!r} is none"
        )
    arguments = cli.trl_settings(trainer, trl)
    if trainer is not None and (tokens is not None or solve == "train.eval_micro_batch"):
        raise UserError("--trainer predicts memory of training only; leave --tokens and train.eval_micro_batch out")
    progress: Any = terminal(stderr=True)
    if solve is not None:
        cli.refuse_given(
            context, "is for a plan for a model, not for --solve; leave it out",
            "count", "goal", "host", "data", "tokens", "min_sequence", "all_", "explain", "write", "html", "figure",
        )  # fmt: skip
        with cli.heavy_imports():
            from moetune.memory.assumed_routing import parse_routing
            from moetune.planning.predictor import Predictor
            from moetune.planning.solve import solve as solve_for
            from moetune.report.memory import span_in_words
            from moetune.training.trl import InTrl

        config = cli.read_run(what, set_)
        in_trl = None if trainer is None else InTrl(trainer, json.dumps(arguments))  # type: ignore[arg-type]
        with progress.status(Text(f"looking for the largest {solve}")):

            def show(value: str, report: MemoryReport) -> None:
                progress.print(f"{solve} {value}: {span_in_words(report)}")

            local = None if solve == "hardware.gpu" else cli.at_hand(gpu, config.hardware.names, config.hardware.count)
            card = local or gpu
            solved = solve_for(
                config, solve, Predictor(card, parse_routing(routing), trainer=in_trl), tight=tight, show=show
            )
        cli.answer(json_, solved.to_json(), _solved(solved), fails=solved.report is None)
        return

    cli.refuse_set(set_, "a plan for a model chooses settings itself")
    from moetune.config.load import refuse_missing
    from moetune.config.memory_size import HOW_TO_WRITE_A_SIZE, parse_size

    most = None if host is None else parse_size(host)
    if host is not None and most is None:
        raise UserError(f"--host {host!r} is not a memory size. {HOW_TO_WRITE_A_SIZE}")
    refuse_missing([] if data is None else [data])
    goals = ("router", "experts", "lora") if goal == "any" else (goal,)
    head = f"planning {shown(what)} on {gpu or 'this machine'}: {', '.join(goals)}"
    progress.print(head)
    with cli.heavy_imports():
        import torch

        from moetune.memory.assumed_routing import parse_routing
        from moetune.planning.at_hand import in_words
        from moetune.planning.files import write_runs
        from moetune.planning.plan import plan as plan_for
        from moetune.planning.views import briefly, plan_view
        from moetune.training.trl import InTrl

    local = cli.at_hand(gpu, count=count)
    card = local or gpu
    if card is None:
        raise UserError("plan needs a card: --gpu l40s, or a size such as --gpu 44GiB; this machine has none")
    why: tuple[str, ...] = () if local is None else (in_words(local),)
    if data is not None:
        from moetune.training.data.sources import looks_like_a_file, open_sources

        if looks_like_a_file(data) or "/" not in data:  # the hub may be out of reach here
            open_sources(data)
        if tokens is None:
            tokens, reasons = _tokens_of(data, what, min_sequence)
            why += reasons
    printed, every = "", any((all_, json_, write, html, figure))
    with progress.status(Text(head)) as status:

        def show_progress(tried: int, total: int, now: str, best: Candidate | None) -> None:
            nonlocal printed
            ways = f"{tried} of {total} ways"
            status.update(Text(f"{ways}: {now}"))
            if best is not None and printed != (shown := briefly(best)):
                printed = shown
                progress.print(f"{ways}: {shown}")

        planned = plan_for(
            what,
            card,
            goals=goals,  # type: ignore[arg-type]
            count=count,
            length=min_sequence,
            host=most,
            data=data,
            tokens=tokens,
            tight=tight,
            routing=parse_routing(routing),
            trainer=None if trainer is None else InTrl(trainer, json.dumps(arguments)),  # type: ignore[arg-type]
            every=every,
            beyond=every or explain,
            simulated=json_,
            processes=min(4, torch.get_num_threads()),
            show=show_progress,
        )
    planned = replace(planned, notes=(*planned.notes, *why))
    view = plan_view(planned, every=all_)
    written = [str(file) for file in ([] if write is None else write_runs(planned, write))]
    if html is not None or figure is not None:
        from moetune.planning.figure import plan_chart
        from moetune.report.page import write_page
    if html is not None:
        write_page(view, html, [plan_chart(planned)] * bool(planned.candidates))
        note(f"{html} written")
    if figure is not None:
        plan_chart(planned).save(figure)
        note(f"{figure} written")
    parts = (view, *(f"{file} written" for file in written))
    cli.answer(json_, {**planned.to_json(), "files": written}, *parts, verbose=explain, fails=not planned.candidates)


def _tokens_of(data: str, model: str, length: int) -> tuple[int | None, tuple[str, ...]]:
    """Count the tokens of a data set as a model's training would read it, in sequences of `length` tokens.

    Return the number and no notes; or None and a note that says why they could not be counted.
    """
    with cli.heavy_imports():
        from moetune.config.load import read_run_config
        from moetune.training.preview import preview

    run = {"model": {"path": model}, "adapt": {}, "train": {"sequence_length": length}, "data": {"train": data}}
    try:
        _, previewed = preview(read_run_config(run, (), f"a run on {data}"))
        return previewed["train"]["tokens"], ()
    except UserError as error:
        return None, (f"no hours for {data!r}, whose tokens could not be counted ({one_line(error)}); give --tokens",)


def _solved(solved: Solved) -> View:
    """Return a view of the largest value that fits, the memory that it needs, and what the next value would need."""
    from moetune.report.memory import left_in_words, span_in_words

    def needs(report: MemoryReport) -> str:
        return f"needs {span_in_words(report)}: {left_in_words(report)}"

    axis = solved.axis
    if solved.report is None:
        assert solved.next_report is not None
        return View(
            axis.key, f"no {axis.key} fits: even {axis.name(solved.next_value)} {needs(solved.next_report)}", "no"
        )
    if solved.next_report is None:
        further = "it is the largest value there is"
    else:
        further = f"the next value, {axis.name(solved.next_value)}, {needs(solved.next_report)}"
    verdict = f"{axis.key}: {axis.name(solved.value)} {needs(solved.report)}"
    return View(axis.key, verdict, solved.report.verdict, [further, f"--set {solved.settings[0]}"])
