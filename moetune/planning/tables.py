"""Plans and comparisons on a terminal, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from moetune.errors import counted
from moetune.memory.changes import Remedy
from moetune.memory.report import MemoryReport
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
    remedies, left_out = list[Text](), dict[str, int]()
    for row in rows:
        report = row.report
        assert report.gpu is not None
        sizes = gib(report.required), gib(headroom(report)), _host(report)
        cells = row.name, report.gpu.name, str(report.verdict), *sizes
        table.add_row(*map(Text, cells), style=_STYLES[report.verdict])
        if report.fits is False:
            remedy = "nothing known makes it fit" if row.remedy is None else _remedy(row.remedy)
            remedies.append(Text(f"{row.name} on {report.gpu.name}: {remedy}"))
        if row.left_out:
            left_out[row.name] = row.left_out
    yield table
    yield from remedies
    if left_out:
        names = ", ".join(f"{name} {gib(size)}" for name, size in left_out.items())
        yield Text(f"An estimate by active parameters leaves out frozen experts: {names}.", style="dim")


def plan_tables(plan: Plan, *, explain: bool = False) -> Iterator[RenderableType]:
    """Yield the verdict, a table of the candidates, and with `explain` what the next larger runs need."""
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
        report, train = one.report, one.config.train
        batch = f"{train.micro_batch} × {train.sequence_length}\n× {train.accumulate}"
        batch += "" if plan.tokens is None else f"\n{counted(train.steps, 'step')}"
        dim = [text for text in ("; ".join(one.strategy.gives_up), speed(one, plan.tokens)) if text]
        what = Text.assemble((one.trains, "bold"), "\n", one.optimizer, *((f"\n{text}", "dim") for text in dim))
        phase = report.moment.phase if report.moment else ""
        needs = f"{gib(report.required)}\n{gib(headroom(report))} left"
        table.add_row(str(number), what, batch, needs, f"{phase}\n{_host(report)}")
    yield table
    if explain:
        for number, one in enumerate(plan.candidates, 1):
            yield Text(f"{number}: {next_larger(one)}")
    best = plan.candidates[0]
    card = f"{plan.gpu} ({gib(plan.usable_bytes)})"
    yield Text(f"best on {card}: {best.trains}, {gib(headroom(best.report))} left", style="bold green")


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
    host = _host(found.report)
    return f"{flags}: {gib(found.report.required)}{host and f', {host} of host memory'}"


def _host(report: MemoryReport) -> str:
    return gib(report.fullest.host_bytes) if report.fullest.host_bytes else ""
