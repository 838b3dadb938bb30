"""The memory report on a terminal: the verdict first, then what it rests on. Readable from 80 columns on.

What is said in words is said here; the page says the same.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from moetune.memory.report import (
    PART_NAMES,
    Change,
    Collective,
    LoadPeaks,
    MemoryReport,
    Moment,
    RankMemory,
    Term,
)
from moetune.memory.time.roofline import Duration, Range
from moetune.memory.time.work import Work
from moetune.models.selection import ranges
from moetune.report.units import gib, percent

METHODS = {
    "trace": "traced: what runs, on tensors without storage",
    "formula": "closed form: a recorded step, at these sizes",
}
ALLOCATED = "allocated at the peak"
_PHASES = {
    "load": "while loading",
    "forward": "in the forward pass",
    "recompute": "in the recomputation",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer's step",
    "evaluation": "in an evaluation",
}


def print_report(report: MemoryReport, console: Console, *, verbose: bool = False, tokens: int | None = None) -> None:
    """Prints the report, verdict first and last; the changes that would help only where it does not fit.

    Args:
        verbose: formulas, single allocations and assumptions as well; else what fits on a screen.
        tokens: say how many hours so many take.
    """
    for renderable in _sections(report, verbose, tokens):
        console.print(renderable, highlight=False)


def verdict(report: MemoryReport) -> str:
    """Whether it fits, what is left or lacking, and where it is tight, what may come to be lacking."""
    if report.gpu is None or report.headroom_bytes is None:
        return f"needs {gib(report.required)}; no GPU named to compare with"
    card = f"{report.gpu.name} ({gib(report.gpu.usable_bytes)} usable)"
    if report.verdict == "no":
        return f"does NOT fit: {gib(-report.headroom_bytes)} too much for {card}"
    if report.verdict == "tight":
        short = report.allowance - report.headroom_bytes
        return f"tight: {gib(report.headroom_bytes)} left on {card}, may be {gib(short)} short"
    return f"fits: yes, {gib(report.headroom_bytes)} headroom on {card}"


def most(report: MemoryReport) -> str:
    """How much which process needs and takes, and whether that is in a step or before the first."""
    fullest = report.fullest
    who = "The process" if len(report.ranks) == 1 else f"Rank {fullest.rank}, the fullest of {len(report.ranks)},"
    in_a_step = report.load.gpu <= max(rank.peak_allocated for rank in report.ranks)
    moment = "at the peak of a step" if in_a_step else "while the weights load"
    cached = f", and takes {gib(report.peak_process)} with what it caches" * (report.peak_process > report.required)
    return f"{who} needs {gib(report.required)} {moment}{cached}."


def on_host(report: MemoryReport) -> str:
    """How much of what the run needs is in host memory; nothing if nothing is."""
    most = max(rank.host_bytes for rank in report.ranks)
    return f"Beside that {gib(most)} of tensors are in pinned host memory." if most else ""


def peak(report: MemoryReport) -> str:
    """Which rank's peak it is, and when it comes."""
    whose = f" on rank {report.fullest.rank}" if len(report.ranks) > 1 else ""
    return f"the peak of a step{whose}" + ("" if report.moment is None else f": {when(report.moment)}")


def when(moment: Moment) -> str:
    where = f" of {moment.module}" if moment.module else ""
    return f"step {moment.step}, micro-step {moment.micro_step} (from 0), {_PHASES[moment.phase]}{where}"


def pace(time: Duration, tokens: int | None = None) -> str:
    """Tokens a second and seconds a step, and hours for so many tokens, from the fast end to the slow one."""
    speed, seconds, share = time.tokens_per_second, time.seconds, time.share
    if time.measured is not None:
        return (
            f"Measured of a run like it: {speed.fast:,.0f} tokens/s, {seconds.fast:.3g} s a step{hours(time, tokens)}."
        )
    return (
        f"Estimated, not measured: {between(speed)} tokens/s, {between(seconds)} s a step"
        f"{hours(time, tokens)}; {100 * share.slow:.0f} to {100 * share.fast:.0f} % of what the card can multiply."
    )


def hours(time: Duration, tokens: int | None) -> str:
    """For so many tokens; nothing where they are not known."""
    return "" if tokens is None else f", {between(time.hours(tokens))} h for {tokens:,} tokens"


def between(ends: Range) -> str:
    """The less first."""
    less, more = (two_digits(end) for end in sorted((ends.fast, ends.slow)))
    return less if less == more else f"{less} to {more}"


def two_digits(number: float) -> str:
    """An estimate's digits: two, no more."""
    rounded = float(f"{number:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def named(part: str) -> str:
    return part.replace("_", " ")


def balance(rank: RankMemory) -> list[tuple[str, int]]:
    """From what tensors take to what the process takes, line by line."""
    return [
        (ALLOCATED, rank.peak_allocated),
        ("+ cached, not in use", rank.peak_reserved - rank.peak_allocated),
        ("= reserved", rank.peak_reserved),
        ("+ outside the allocator", rank.outside_allocator),
        ("= process", rank.peak_process),
    ]


def loading(load: LoadPeaks) -> list[str]:
    return [f"host: {gib(load.host)}", f"GPU: {gib(load.gpu)}, and what is outside the allocator"]


def alike(ranks: Iterable[RankMemory]) -> list[tuple[str, RankMemory]]:
    """Ranks of equal memory as one of them, under all their numbers as in `0-3,6`."""
    groups: dict[tuple[object, ...], list[RankMemory]] = {}
    for rank in ranks:
        groups.setdefault((rank.parts, rank.outside_allocator, rank.peak_reserved, rank.host_bytes), []).append(rank)
    return [(ranges(rank.rank for rank in group), group[0]) for group in groups.values()]


def flags(change: Change) -> str:
    """A change as it is typed into a shell."""
    return " ".join(f"--set {shlex.quote(setting)}" for setting in change.settings)


def effect(change: Change) -> str:
    return f"saves {gib(change.saves)}: the process then needs {gib(change.peak_process)}; {change.why}"


def folded(terms: Iterable[Term]) -> list[Term]:
    """The terms, those below 0.1 % of all together as one of each part: what is left can be read on a screen."""
    terms = list(terms)
    least = sum(term.bytes for term in terms) / 1000
    shown = []
    for part in PART_NAMES:
        large = [term for term in terms if term.part == part and term.bytes >= least]
        small = [term for term in terms if term.part == part and term.bytes < least]
        if len(small) > 1:
            taken = sum(term.bytes for term in small)
            small = [
                Term(part, f"{len(small)} smaller ones", "each below 0.1 %", "--json lists them", taken, small[0].page)
            ]
        shown += [*large, *small]
    return shown


# --- Sections -----------------------------------------------------------------------------------------------------
# Names and formulas hold square brackets, which rich would read as markup in a str: they go in as Text.


def _sections(report: MemoryReport, verbose: bool, tokens: int | None) -> Iterator[RenderableType]:
    colour = {"yes": "bold green", "tight": "bold yellow", "no": "bold red", None: "bold"}[report.verdict]
    yield Text(verdict(report), style=colour)
    yield Text(most(report))
    if said := on_host(report):
        yield Text(said)
    yield _about(report)
    if report.fits is False and report.changes:
        changes = [f"{flags(change)}\n{effect(change)}" for change in report.changes]
        yield _titled("what makes it fit, the mildest change first", _list(changes))
    yield _titled(peak(report), _parts(report.fullest))
    if len(report.ranks) > 1:
        yield _titled(f"{len(report.ranks)} ranks", _ranks(report))
    if verbose:
        yield from _details(report)
    if report.time is not None:
        yield Text(f"\n{pace(report.time, tokens)}")
        if verbose:
            yield _titled("time of a step, if each part were alone", _times(report.time))
    if report.notes:
        yield _titled("notes", _list(report.notes))
    if not verbose:
        yield Text("\n--verbose: formulas, single allocations, loading, what is assumed", style="dim")
    yield Text(verdict(report), style=colour)


def _details(report: MemoryReport) -> Iterator[RenderableType]:
    if report.moment is not None and report.moment.largest:
        yield _titled("largest allocations alive at the peak", _largest(report.moment))
    if report.terms:
        yield _titled("formula terms", _terms(report.terms))
    yield _titled("loading, before the first step", _list(loading(report.load)))
    if report.collectives:
        yield _titled("communication of one step, leaving each rank", _collectives(report.collectives))
    if report.assumptions:
        yield _titled("assumed", _list(report.assumptions))


def _about(report: MemoryReport) -> Table:
    """What was predicted, and how."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, said in (("model", report.model), *report.about, ("method", METHODS[report.method])):
        grid.add_row(Text(name), Text(said))
    return grid


def _parts(rank: RankMemory) -> Table:
    table = Table()
    table.add_column("part")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    for name, count in rank.parts.items():
        table.add_row(named(name), gib(count), percent(count, rank.peak_allocated), style="" if count else "dim")
    table.add_section()
    for line, count in balance(rank):
        share = percent(count, rank.peak_allocated) if line == ALLOCATED else ""
        table.add_row(line, gib(count), share, style="" if line.startswith("+") else "bold")
    return table


def _largest(moment: Moment) -> Table:
    table = Table()
    table.add_column("part, made in")
    table.add_column("module, operation", overflow="fold")
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    for item in moment.largest:
        what, where = _cell(named(item.part), item.phase), _cell(item.module or "the step itself", item.op)
        table.add_row(what, where, f"{item.count:,}", gib(item.bytes))
    return table


def _terms(terms: tuple[Term, ...]) -> Table:
    table = Table(show_footer=True, show_lines=True)
    table.add_column("part, page", footer="sum", overflow="fold")
    table.add_column("term, formula, numbers", overflow="fold")
    table.add_column("bytes", footer=gib(sum(term.bytes for term in terms)), justify="right", no_wrap=True)
    for term in folded(terms):
        numbers = f"\n{term.numbers}" if term.numbers else ""
        formula = Text.assemble((term.name, "bold"), "\n", term.formula, (numbers, "dim"))
        table.add_row(_cell(named(term.part), term.page), formula, gib(term.bytes))
    return table


def _ranks(report: MemoryReport) -> Table:
    table = Table()
    table.add_column("rank", overflow="fold")
    for heading in ("allocated", "reserved", "outside", "process"):
        table.add_column(heading, justify="right", no_wrap=True)
    for numbers, rank in alike(report.ranks):
        counts = rank.peak_allocated, rank.peak_reserved, rank.outside_allocator, rank.peak_process
        style = "bold" if rank.peak_process == report.fullest.peak_process else ""
        table.add_row(numbers, *map(gib, counts), style=style)
    return table


def _collectives(collectives: tuple[Collective, ...]) -> Table:
    table = Table()
    table.add_column("what", overflow="fold")
    table.add_column("kind", no_wrap=True)
    table.add_column("axis", no_wrap=True)
    table.add_column("calls", justify="right", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    for item in collectives:
        table.add_row(Text(item.what), item.kind, Text(item.axis), f"{item.calls:,}", gib(item.bytes))
    return table


def _times(time: Duration) -> Table:
    table = Table()
    for heading in ("part", "TFLOP", "GB", "launches", "ms, fast", "ms, slow"):
        table.add_column(heading, justify="left" if heading == "part" else "right", no_wrap=True)
    works: dict[str, Work] = dict(time.work.items())
    for part, seconds in sorted(time.parts.items(), key=lambda item: -item[1].slow):
        work = works.get(part, Work())
        moved = work.bytes + work.product_bytes + work.copied
        counted = (work.flops + work.flops32) / 1e12, moved / 1e9, work.launches
        cells = [f"{number:,.{digits}f}" if number else "" for number, digits in zip(counted, (2, 1, 0), strict=True)]
        table.add_row(named(part), *cells, f"{1000 * seconds.fast:,.1f}", f"{1000 * seconds.slow:,.1f}")
    return table


def _titled(title: str, body: RenderableType) -> RenderableType:
    """A title beside the table, not of it: a table's own title wraps at the table's width."""
    return Group(Text(f"\n{title}", style="bold"), body)


def _cell(first: str, second: str) -> Text:
    return Text.assemble(first, "\n", (second, "dim"))


def _list(lines: Iterable[str]) -> Table:
    """A bulleted list whose long lines hang under their own beginning."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column()
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row("-", Text(line))
    return grid
