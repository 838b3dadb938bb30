"""Plans and comparisons as tables and sentences, for the terminal and the HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moetune.errors import counted
from moetune.memory.changes import Remedy
from moetune.memory.report import MemoryReport
from moetune.planning.compare import Compared
from moetune.planning.plan import Plan
from moetune.planning.search import Candidate
from moetune.planning.solve import headroom
from moetune.report.units import between, gib, hours, named
from moetune.report.view import Table, View, ViewSection


def comparison(rows: Sequence[Compared]) -> Iterator[Table | str]:
    """Yield the table of a comparison; then a sentence for each run that does not fit, with what would make it fit."""
    cells = []
    for row in rows:
        report = row.report
        assert report.gpu is not None
        host = gib(report.fullest.host_bytes) if report.fullest.host_bytes else ""
        needs, left = gib(report.required), gib(report.headroom_bytes or 0)
        cells.append((row.name, report.gpu.name, str(report.verdict), needs, left, host))
    yield Table(("run", "card", "fits", ">needs", ">left", ">host"), cells)
    for row in rows:
        if row.report.fits is False:
            assert row.report.gpu is not None
            said = "no change of the run file is known that makes it fit" if row.remedy is None else _remedy(row.remedy)
            yield f"{row.name} on {row.report.gpu.name}: {said}"
    left_out = {row.name: row.left_out for row in rows if row.left_out}
    if left_out:
        names = ", ".join(f"{name} {gib(size)}" for name, size in left_out.items())
        yield f"An estimate by active parameters leaves out frozen experts: {names}."


def plan_view(plan: Plan) -> View:
    """Return a view of a plan: the best candidate, a table of all, and what the next larger runs would need."""
    card = f"{plan.gpu} ({gib(plan.usable_bytes)})"
    title = f"{plan.model} on {card}"
    notes = [ViewSection("notes", plan.notes)] * bool(plan.notes)
    if not plan.candidates:
        verdict, *lines = missed(plan)
        return View(title, verdict, "no", lines, sections=notes)
    best = plan.candidates[0]
    rows = []
    for number, one in enumerate(plan.candidates, 1):
        train, report = one.config.train, one.report
        batch = f"{train.micro_batch} × {train.sequence_length}\n× {train.accumulate}"
        batch += "" if plan.tokens is None else f"\n{counted(train.steps, 'step')}"
        what = [one.trains, one.optimizer, "; ".join(one.strategy.gives_up), room(one), speed(one, plan.tokens)]
        needs = f"{gib(report.required)}\n{gib(headroom(report))} left"
        host = gib(report.fullest.host_bytes) if report.fullest.host_bytes else ""
        phase = report.moment.phase if report.moment else ""
        rows.append((str(number), "\n".join(filter(None, what)), batch, needs, f"{phase}\n{host}"))
    headings = ("", "trains, optimizer, what is given up", "batch", ">needs, left", "fullest, host")
    reasons = [f"{number}: {next_larger(one)}" for number, one in enumerate(plan.candidates, 1)]
    return View(
        title,
        f"best on {card}: {best.trains}, {gib(best.report.headroom_bytes or 0)} left",
        best.report.verdict,
        sections=[
            *notes,
            ViewSection("what fits", Table(headings, rows)),
            ViewSection("next larger runs, which do not fit", reasons, True),
        ],
    )


def speed(one: Candidate, tokens: int | None) -> str:
    """Return the estimated tokens/s of a candidate, and the hours for `tokens`; empty if the speed is not known."""
    time = one.report.time
    return "" if time is None else f"{between(time.tokens_per_second)} tokens/s, estimated{hours(time, tokens)}"


def room(one: Candidate) -> str:
    """Return how many layers of a candidate could keep gate_up's outputs (`train.keep_rows`); empty if none could."""
    fit = one.report.rows_that_fit
    return f"room for the rows of {counted(fit, 'layer')} (train.keep_rows)" if fit else ""


def next_larger(one: Candidate) -> str:
    """Return a sentence that says how much memory the next larger run of a candidate would need."""
    larger = one.next_larger
    if larger is None:
        return "nothing larger exists"
    part, size = max(larger.report.fullest.parts.items(), key=lambda item: item[1])
    required, lacking = gib(larger.report.required), gib(-headroom(larger.report))
    return f"{larger.what} would need {required}, {lacking} too much; the largest part: {named(part)}, {gib(size)}"


def missed(plan: Plan) -> Iterator[str]:
    """Yield sentences for a plan in which nothing fits: the nearest miss, what would make it fit, and larger GPUs."""
    miss, card = plan.miss, f"{plan.gpu} ({gib(plan.usable_bytes)})"
    if miss is None:
        yield f"nothing fits {card}, and no strategy could be predicted"
        return
    needs, lacking = gib(miss.report.required), gib(-headroom(miss.report))
    yield f"nothing fits {card}: the nearest miss needs {needs}, {lacking} too much"
    fullest, train = miss.report.fullest, miss.config.train
    parts = [("outside_allocator", fullest.outside_allocator), *fullest.parts.items()]
    most, size = max(parts, key=lambda part: part[1])
    yield (
        f"nearest: {miss.trains}, {train.micro_batch} × {train.sequence_length} tokens; the largest part: "
        f"{named(most)}, {gib(size)}"
    )
    if miss.remedy is None:
        yield "no change of the run file is known that makes it fit"
    else:
        yield f"it fits with {_remedy(miss.remedy)}"
    if miss.cards:
        yield f"it fits {' or '.join(miss.cards)}"


def _remedy(found: Remedy) -> str:
    """Return the `--set` flags of a remedy, and the memory that the run then needs."""
    flags = " ".join(f"--set {flag}" for flag in found.flags)
    host = _host(found.report)
    return f"{flags}: {gib(found.report.required)}{host and f', {host} of host memory'}"


def _host(report: MemoryReport) -> str:
    """Return the host memory of a run; empty if it takes none."""
    return gib(report.fullest.host_bytes) if report.fullest.host_bytes else ""
