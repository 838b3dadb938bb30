"""Plans and comparisons on a terminal, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from moetune.errors import counted
from moetune.memory.changes import Remedy
from moetune.planning.compare import Compared
from moetune.planning.plan import Plan
from moetune.planning.search import Candidate
from moetune.planning.solve import headroom
from moetune.report.terminal import between, hours
from moetune.report.units import gib

_STYLES = {"yes": "green", "tight": "yellow", "no": "red", None: ""}


def comparison(rows: Sequence[Compared]) -> Iterator[RenderableType]:
    """Yield the table, and below it what would make those fit that do not."""
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
            said = "nothing known makes it fit" if row.remedy is None else _remedy(row.remedy)
            yield Text(f"{row.name} on {row.report.gpu.name}: {said}")
    left_out = {row.name: row.left_out for row in rows if row.left_out}
    if left_out:
        names = ", ".join(f"{name} {gib(size)}" for name, size in left_out.items())
        yield Text(f"An estimate by active parameters leaves out frozen experts: {names}.", style="dim")


def plan_tables(plan: Plan, *, explain: bool = False) -> Iterator[RenderableType]:
    """Yield the verdict, a table of the candidates, and with `explain` what the next larger runs need."""
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
        given = ("\n", ("; ".join(one.strategy.gives_up), "dim")) if one.strategy.gives_up else ()
        what = Text.assemble((one.trains, "bold"), "\n", one.optimizer, *given)
        host = gib(one.report.fullest.host_bytes) if one.report.fullest.host_bytes else ""
        phase = one.report.moment.phase if one.report.moment else ""
        if pace := speed(one, plan.tokens):
            what.append(f"\n{pace}", "dim")
        table.add_row(
            str(number),
            what,
            batch,
            f"{gib(one.report.required)}\n{gib(headroom(one.report))} left",
            f"{phase}\n{host}",
        )
    yield table
    if explain:
        for number, one in enumerate(plan.candidates, 1):
            yield Text(f"{number}: {next_larger(one)}")
    best = plan.candidates[0]
    yield Text(f"best on {card}: {best.trains}, {gib(best.report.headroom_bytes or 0)} left", style="bold green")


def speed(one: Candidate, tokens: int | None) -> str:
    """Tokens a second, and hours for `tokens`; empty where the card's speed is not known."""
    time = one.report.time
    return "" if time is None else f"{between(time.tokens_per_second)} tokens/s, estimated{hours(time, tokens)}"


def next_larger(one: Candidate) -> str:
    """Say what the next larger run would need."""
    larger = one.next_larger
    if larger is None:
        return "there is no more of it to train"
    part, size = max(larger.report.fullest.parts.items(), key=lambda item: item[1])
    required, lacking = gib(larger.report.required), gib(-headroom(larger.report))
    most = f"the most of it {part.replace('_', ' ')}, {gib(size)}"
    return f"{larger.what} would need {required}, {lacking} too much; {most}"


def missed(plan: Plan) -> Iterator[Text]:
    """Yield, where nothing fits, what is nearest, and what would make it fit."""
    miss, card = plan.miss, f"{plan.gpu} ({gib(plan.usable_bytes)})"
    if plan.candidates:
        return
    if miss is None:
        yield Text(f"nothing fits {card}, and no way there is could be predicted", "bold red")
        return
    needs, lacking = gib(miss.report.required), gib(-headroom(miss.report))
    yield Text(f"nothing fits {card}: what is nearest needs {needs}, {lacking} too much", "bold red")
    fullest, train = miss.report.fullest, miss.config.train
    parts = [("outside_allocator", fullest.outside_allocator), *fullest.parts.items()]
    most, size = max(parts, key=lambda part: part[1])
    yield Text(
        f"nearest: {miss.trains}, {train.micro_batch} × {train.sequence_length} tokens; the most of it "
        f"{most.replace('_', ' ')}, {gib(size)}"
    )
    if miss.remedy is None:
        yield Text("no change of the run file is known that makes it fit")
    else:
        yield Text(f"it fits with {_remedy(miss.remedy)}")
    if miss.cards:
        yield Text(f"it fits {' or '.join(miss.cards)}")


def _remedy(found: Remedy) -> str:
    flags = " ".join(f"--set {flag}" for flag in found.flags)
    host = f", {gib(found.report.fullest.host_bytes)} of host memory" if found.report.fullest.host_bytes else ""
    return f"{flags}: {gib(found.report.required)}{host}"
