"""Plans and comparisons on a terminal, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from moetune.errors import counted
from moetune.memory.changes import Combination
from moetune.memory.report import MemoryReport
from moetune.planning.compare import Compared
from moetune.planning.plan import Candidate, Plan
from moetune.report.terminal import between, hours
from moetune.report.units import gib

_STYLES = {"yes": "green", "tight": "yellow", "no": "red", None: ""}


def comparison(rows: Sequence[Compared]) -> Iterator[RenderableType]:
    """The table, and below it what would make those fit that do not."""
    table = Table()
    table.add_column("run", overflow="fold")
    table.add_column("card", overflow="fold")
    table.add_column("fits", no_wrap=True)
    for heading in ("needs", "left", "host"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        report = row.report
        assert report.gpu is not None
        cells = row.name, report.gpu.name, str(report.verdict), gib(report.required), gib(report.headroom_bytes or 0)
        host = gib(report.fullest.host_bytes) if report.fullest.host_bytes else ""
        table.add_row(*map(Text, cells), host, style=_STYLES[report.verdict])
    yield table
    for row in rows:
        if row.report.fits is False:
            assert row.report.gpu is not None
            said = "nothing known makes it fit" if row.combination is None else _together(row.combination)
            yield Text(f"{row.name} on {row.report.gpu.name}: {said}")
    left_out = {row.name: row.left_out for row in rows if row.left_out}
    if left_out:
        names = ", ".join(f"{name} {gib(size)}" for name, size in left_out.items())
        yield Text(f"An estimate by active parameters leaves out frozen experts: {names}.", style="dim")


def plan_tables(plan: Plan, *, explain: bool = False) -> Iterator[RenderableType]:
    """The verdict, the candidates in a table, and with `explain` why no more of each fits."""
    card = f"{plan.gpu} ({gib(plan.usable_bytes)})"
    yield from missed(plan)
    for note in plan.notes:
        yield Text(f"note: {note}", style="dim")
    if not plan.candidates:
        return
    table = Table()
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("trains, optimizer, what is given up", overflow="fold")
    table.add_column("batch", no_wrap=True)
    table.add_column("needs, left", justify="right", no_wrap=True)
    table.add_column("fullest, host", no_wrap=True)
    for number, one in enumerate(plan.candidates, 1):
        train = one.config.train
        batch = f"{train.micro_batch} × {train.sequence_length}\n× {train.accumulate}"
        batch += "" if plan.tokens is None else f"\n{counted(train.steps, 'step')}"
        given = ("\n", ("; ".join(one.gives_up), "dim")) if one.gives_up else ()
        what = Text.assemble((one.trains, "bold"), "\n", one.optimizer, *given)
        host = gib(one.report.fullest.host_bytes) if one.report.fullest.host_bytes else ""
        phase = one.report.moment.phase if one.report.moment else ""
        if pace := speed(one, plan.tokens):
            what.append(f"\n{pace}", "dim")
        table.add_row(str(number), what, batch, f"{gib(one.report.required)}\n{_left(one.report)}", f"{phase}\n{host}")
    yield table
    if explain:
        for number, one in enumerate(plan.candidates, 1):
            yield Text(f"{number}: {beyond(one)}")
    best = plan.candidates[0]
    yield Text(f"best on {card}: {best.trains}, {gib(best.report.headroom_bytes or 0)} left", style="bold green")


def _left(report: MemoryReport) -> str:
    assert report.headroom_bytes is not None
    return f"{gib(report.headroom_bytes)} left"


def speed(one: Candidate, tokens: int | None) -> str:
    """Tokens a second, and hours for so many; empty where the card's speed is not known."""
    time = one.report.time
    return "" if time is None else f"{between(time.tokens_per_second)} tokens/s, estimated{hours(time, tokens)}"


def beyond(one: Candidate) -> str:
    """Why no more of it fits."""
    if one.beyond is None:
        return "there is no more of it to train"
    what, report = one.beyond.what, one.beyond.report
    assert report.headroom_bytes is not None
    part, size = max(report.fullest.parts.items(), key=lambda item: item[1])
    largest = f"the most of it {part.replace('_', ' ')}, {gib(size)}"
    return f"{what} would need {gib(report.required)}, {gib(-report.headroom_bytes)} too much; {largest}"


def missed(plan: Plan) -> Iterator[Text]:
    """Where nothing fits: what is nearest to it, and what would make it fit."""
    miss, card = plan.miss, f"{plan.gpu} ({gib(plan.usable_bytes)})"
    if plan.candidates:
        return
    if miss is None:
        yield Text(f"nothing fits {card}, and no way there is could be predicted", "bold red")
        return
    assert miss.report.headroom_bytes is not None
    needs, lacking = gib(miss.report.required), gib(-miss.report.headroom_bytes)
    yield Text(f"nothing fits {card}: what is nearest needs {needs}, {lacking} too much", "bold red")
    outside = miss.report.fullest.outside_allocator
    most, size = max((("outside_allocator", outside), *miss.report.fullest.parts.items()), key=lambda part: part[1])
    train = miss.config.train
    yield Text(
        f"nearest: {miss.trains}, {train.micro_batch} × {train.sequence_length} tokens; the most of it "
        f"{most.replace('_', ' ')}, {gib(size)}"
    )
    if miss.combination is not None:
        yield Text(f"it fits with {_together(miss.combination)}")
    else:
        yield Text("no change of the run file is known that makes it fit")
    if miss.cards:
        yield Text(f"it fits {' or '.join(miss.cards)}")


def _together(found: Combination) -> str:
    flags = " ".join(f"--set {flag}" for flag in found.flags)
    host = f", {gib(found.report.fullest.host_bytes)} of host memory" if found.report.fullest.host_bytes else ""
    return f"{flags}: {gib(found.report.required)}{host}"
