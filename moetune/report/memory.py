"""View of a `MemoryReport`: verdict, summary, tables of parts, ranks, terms and time."""

import shlex
from collections.abc import Iterable, Iterator

from moetune.config.fields import ranges
from moetune.memory.report import PART_NAMES, Change, MemoryReport, Moment, RankMemory, Term
from moetune.memory.time.estimate import Duration
from moetune.memory.time.work import Work
from moetune.memory.unknowns import Span, Verdict
from moetune.report.units import between, from_to, gib, hours, named, percent
from moetune.report.view import Table, View, ViewSection

_PHASES = {
    "load": "while loading",
    "generation": "while completions are generated",
    "old_logprobs": "in the pass over what was generated",
    "reference": "in the reference's pass",
    "forward": "in the forward pass",
    "recompute": "in the recomputation",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer's step",
    "evaluation": "in an evaluation",
}


def memory_view(report: MemoryReport, tokens: int | None = None) -> View:
    """Return the view of a memory report, with changes of the run file if the run does not surely fit.

    Args:
        report: the report.
        tokens: the length of a training run, for which the view states the hours; None: no hours.
    """
    time = "" if report.time is None else pace(report.time, tokens)
    lines = [*needs(report), time]
    return View(
        report.model,
        verdict(report),
        report.verdict,
        [line for line in lines if line],
        [("model", report.model), *report.about],
        [section for section in _sections(report) if section.body != () and section.body != []],
    )


def _sections(report: MemoryReport) -> Iterator[ViewSection]:
    if report.changes and report.verdict != "yes":
        changes = [f"{flags(change)}\n{effect(change)}" for change in report.changes]
        yield ViewSection("what makes it fit, the mildest change first", changes)
    yield ViewSection(peak(report), _parts(report.fullest))
    if len(report.ranks) > 1:
        yield ViewSection(f"{len(report.ranks)} ranks", _ranks(report))
    if report.moment is not None and report.moment.largest:
        yield ViewSection("largest allocations alive at the peak", _largest(report.moment), True)
    if report.terms:
        yield ViewSection("what is alive at the peak", _terms(report.terms), True)
    load = report.load
    at_load = [f"host: {gib(load.host)}", f"GPU: {gib(load.gpu)}, and what is outside the allocator"]
    yield ViewSection("loading, before the first step", at_load, True)
    if report.collectives:
        rows = [(op.what, op.kind, op.axis, f"{op.calls:,}", gib(op.bytes)) for op in report.collectives]
        table = Table(("what", "kind", "axis", ">calls", ">bytes"), rows)
        yield ViewSection("communication of one step, bytes sent by each rank", table, True)
    yield ViewSection("assumed", report.assumptions, True)
    yield ViewSection("why a range is needed, from less to more", _unknowns(report), True)
    if report.time is not None:
        yield ViewSection("time of a step, each part by itself", _times(report.time), True)
    yield ViewSection("notes", report.notes)


def phases(report: MemoryReport) -> str:
    """Format the most live bytes in each phase of a TRL trainer's step, as `live at most: generation 2.00 GiB, …`;
    empty for moetune's own steps."""
    if report.trainer is None:
        return ""
    return "live at most: " + ", ".join(f"{phase} {gib(most)}" for phase, most in report.phases)


# --- Words --------------------------------------------------------------------------------------------------------


def verdict(report: MemoryReport) -> str:
    """Format the verdict in one line: whether the run fits, and how much memory is left or missing on GPU or host;
    without a GPU or host to compare with, the bytes that it needs."""
    if report.gpu is None and report.verdict is None:
        return f"needs {gib(report.required)}; no GPU named to compare with"
    heads = {"no": "does NOT fit: ", "tight": "tight: ", "yes": "fits: yes, ", None: ""}
    sides = _sides(report)
    joined = "; ".join(f"{left} {'for' if fits == 'no' else 'on'} {where}" for fits, left, where in sides)
    return heads[report.verdict] + joined


def left_in_words(report: MemoryReport) -> str:
    """Format the bytes that a run leaves free or lacks, as `1.20 to 1.90 GiB left`: those of its GPU, and, followed by
    ` on the host`, those of the host where that decides the verdict. Empty without a verdict."""
    return "; ".join(f"{left}{' on the host' * (where[:8] == 'the host')}" for _, left, where in _sides(report))


def _sides(report: MemoryReport) -> list[tuple[Verdict, str, str]]:
    """Return (verdict, bytes left or missing as text, name and size of the memory) for the GPU and for the host.

    One that has a milder verdict than the whole report is left out; so is the host if both fit.
    """
    sides: list[tuple[Verdict, str, str]] = []
    if report.gpu is not None and report.card_verdict is not None:
        usable, span = report.gpu.usable_bytes, report.span
        card = f"{report.gpu.name} ({gib(usable)} usable)"
        sides.append((report.card_verdict, _left(report.card_verdict, usable, span), card))
    if report.host is not None and report.host.room is not None and report.host_verdict is not None:
        available = report.host.room
        host = f"the host ({gib(available.value)}, {available.source})"
        sides.append((report.host_verdict, _left(report.host_verdict, available.value, report.host.span), host))
    return [side for side in sides if side[0] == report.verdict][: 1 if report.verdict == "yes" else 2]


def _left(verdict: Verdict, size: int, span: Span) -> str:
    """Format what a run that needs `span` leaves of `size` bytes, as a range; if it does not fit (`verdict` is `no`),
    the bytes that it is expected to lack."""
    if verdict == "no":
        return f"{gib(span.expected - size)} too much"
    least, most = size - span.high, size - span.low
    return f"{gib(most)} left to {gib(-least)} too much" if least < 0 else f"{from_to(least, most)} left"


def span_in_words(report: MemoryReport) -> str:
    """Format the GPU memory that a run needs, as `26.40 to 28.10 GiB, 26.70 GiB expected`."""
    span = report.span
    return f"{from_to(span.low, span.high)}, {gib(span.expected)} expected"


def needs(report: MemoryReport) -> list[str]:
    """Return sentences, of which some may be empty, on what GPU and host need, and why that is a range.

    For a run on a CPU, they are on the host alone.
    """
    on_card = [most(report), why_a_range(report)] if report.device == "cuda" else []
    return [*on_card, on_host(report), phases(report)]


def most(report: MemoryReport) -> str:
    """Return a sentence on the process that needs most memory: how much, and whether in a step or during loading."""
    fullest = report.fullest
    who = "The process" if len(report.ranks) == 1 else f"Rank {fullest.rank}, the fullest of {len(report.ranks)},"
    in_a_step = report.load.gpu <= max(rank.peak_allocated for rank in report.ranks)
    moment = "at the peak of a step" if in_a_step else "while the weights load"
    return f"{who} needs {span_in_words(report)}, {moment}."


def why_a_range(report: MemoryReport) -> str:
    """Return a sentence that lists each unknown of the prediction and the bytes by which it may change the need."""
    causes = []
    for unknown in report.every_unknown:
        ends = f"+{gib(unknown.above)}" if unknown.above else ""
        ends = f"-{gib(unknown.below)}{ends and f' to {ends}'}" if unknown.below else ends
        if ends:
            causes.append(f"{unknown.cause} {ends}")
    return f"Not known: {', '.join(causes)}."


def on_host(report: MemoryReport) -> str:
    """Return a sentence on the memory that the host needs and has; empty if it was not predicted."""
    host = report.host
    if host is None:
        return ""
    span = host.span
    pinned = f", {gib(host.processes * host.pinned)} of it pinned" if host.pinned >= 2**20 else ""
    available = "" if host.room is None else f"; it has {gib(host.room.value)} ({host.room.source})"
    return f"The host needs {from_to(span.low, span.high)} of RAM{pinned}{available}."


def peak(report: MemoryReport) -> str:
    """Return the title of the table of parts: on which rank the peak occurs, and when."""
    whose = f" on rank {report.fullest.rank}" if len(report.ranks) > 1 else ""
    return f"the peak of a step{whose}" + ("" if report.moment is None else f": {when(report.moment)}")


def when(moment: Moment) -> str:
    """Format a moment: `step 1, micro-step 0 (from 0), in the backward pass of model.layers.3.mlp`."""
    where = f" of {moment.module}" if moment.module else ""
    return f"step {moment.step}, micro-step {moment.micro_step} (from 0), {_PHASES[moment.phase]}{where}"


def pace(time: Duration, tokens: int | None = None) -> str:
    """Return a sentence on the speed of a run: tokens/s, seconds per step, hours for `tokens` (None: no hours).

    Estimates are ranges.
    """
    speed, seconds, share = time.tokens_per_second, time.seconds, time.share
    if time.measured is not None:
        return (
            f"Measured in a similar run: {speed.fast:,.0f} tokens/s, {seconds.fast:.3g} s a step{hours(time, tokens)}."
        )
    basis = "Estimated" if time.of_card else "Estimated, on a kind of card that was never measured"
    return (
        f"{basis}: {between(speed)} tokens/s, {between(seconds)} s a step"
        f"{hours(time, tokens)}; {100 * share.slow:.0f} to {100 * share.fast:.0f} % of the card's 16-bit FLOP/s."
    )


def flags(change: Change) -> str:
    """Format the settings of a change as `--set` options, quoted for a shell."""
    return " ".join(f"--set {shlex.quote(setting)}" for setting in change.settings)


def effect(change: Change) -> str:
    """Format the effect of a change: the bytes that it saves, those that the process then needs, and why."""
    return f"saves {gib(change.saves)}: the process then needs {gib(change.peak_process)}; {change.why}"


# --- Tables -------------------------------------------------------------------------------------------------------


def _parts(rank: RankMemory) -> Table:
    parts = ((named(name), count) for name, count in rank.parts.items() if count)
    rows = [(name, gib(count), percent(count, rank.peak_allocated)) for name, count in parts]
    return Table(("part", ">bytes", ">share"), rows, [(line, gib(count), "") for line, count in balance(rank)])


def balance(rank: RankMemory) -> list[tuple[str, int]]:
    """Return (label, bytes) rows that add up: allocated + cached = reserved, + outside the allocator = process."""
    return [
        ("allocated at the peak", rank.peak_allocated),
        ("+ cached, not in use", rank.peak_reserved - rank.peak_allocated),
        ("= reserved", rank.peak_reserved),
        ("+ outside the allocator", rank.outside_allocator),
        ("= process", rank.peak_process),
    ]


def _unknowns(report: MemoryReport) -> Table:
    rows = [(unknown.cause, unknown.why, gib(unknown.below), gib(unknown.above)) for unknown in report.every_unknown]
    span = report.span
    below, above = gib(span.expected - span.low), gib(span.high - span.expected)
    return Table(("not known", "what it is", ">less by", ">more by"), rows, [("sum", "", below, above)])


def _largest(moment: Moment) -> Table:
    rows = []
    for group in moment.largest:
        where = f"{group.module or 'the step itself'}\n{group.op}"
        rows.append((f"{named(group.part)}\n{group.phase}", where, f"{group.count:,}", gib(group.bytes)))
    return Table(("part, made in", "module, operation", ">count", ">bytes"), rows)


def _terms(terms: tuple[Term, ...]) -> Table:
    rows = []
    for term in sorted(terms, key=lambda term: PART_NAMES.index(term.part)):
        text = "\n".join(filter(None, (term.name, term.numbers)))
        rows.append((f"{named(term.part)}\ndocs/{term.page}", text, gib(term.bytes)))
    total = "sum", "", gib(sum(term.bytes for term in terms))
    return Table(("part, page", "term, number", ">bytes"), rows, [total])


def alike(ranks: Iterable[RankMemory]) -> list[tuple[str, RankMemory]]:
    """Group ranks of equal memory; return (rank numbers such as `0-3,6`, memory of one of them) for each group."""
    groups: dict[tuple[object, ...], list[RankMemory]] = {}
    for rank in ranks:
        key = rank.parts, rank.outside_allocator, rank.peak_reserved, rank.host_bytes, rank.holds, rank.card
        groups.setdefault(key, []).append(rank)
    return [(ranges(rank.rank for rank in group), group[0]) for group in groups.values()]


def _ranks(report: MemoryReport) -> Table:
    if any(rank.holds for rank in report.ranks):
        rows = []
        for numbers, rank in alike(report.ranks):
            holds = f"{numbers}: {rank.holds}" + (f"\non {rank.card.name}" if rank.card else "")
            rows.append((holds, *map(gib, (rank.peak_allocated, rank.peak_process, rank.sent))))
        return Table(("rank: its layers", ">allocated", ">process", ">sends a step"), rows)
    rows = [
        (numbers, *map(gib, (rank.peak_allocated, rank.peak_reserved, rank.outside_allocator, rank.peak_process)))
        for numbers, rank in alike(report.ranks)
    ]
    return Table(("rank", ">allocated", ">reserved", ">outside", ">process"), rows)


def _times(time: Duration) -> Table:
    rows = []
    works: dict[str, Work] = dict(time.work.items())
    for part, seconds in sorted(time.parts.items(), key=lambda item: -item[1].slow):
        work = works.get(part, Work())
        moved = work.bytes + work.copied
        counted = ((work.flops + work.flops32) / 1e12, 2), (moved / 1e9, 1), (work.launches, 0)
        cells = [f"{number:,.{digits}f}" if number else "" for number, digits in counted]
        rows.append((named(part), *cells, f"{1000 * seconds.fast:,.1f}", f"{1000 * seconds.slow:,.1f}"))
    return Table(("part", ">TFLOP", ">GB", ">launches", ">ms, fast", ">ms, slow"), rows)
