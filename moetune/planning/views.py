"""Plans and comparisons as tables and sentences, for terminal and HTML."""

from collections.abc import Iterator, Sequence

from moetune.errors import counted
from moetune.memory.report import MemoryReport
from moetune.planning.candidate import Candidate
from moetune.planning.compare import Compared
from moetune.planning.plan import Plan
from moetune.planning.savings import Remedy
from moetune.planning.strategies import Goal
from moetune.report.memory import left_in_words, span_in_words
from moetune.report.units import between, from_to, gib, hours
from moetune.report.view import Table, View, ViewSection


def comparison(rows: Sequence[Compared]) -> Iterator[Table | str]:
    """Yield the table of a comparison; then a sentence for each run that does not fit, with what would make it fit; and
    one on the frozen experts that an estimate by active parameters leaves out."""
    cells = []
    for row in rows:
        report = row.report
        assert report.gpu is not None
        needs, left = gib(report.required), gib(report.headroom_bytes or 0)
        cells.append((row.name, report.gpu.name, str(report.verdict), needs, left, _host(report)))
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


def plan_view(plan: Plan, *, every: bool = False) -> View:
    """Return the view of a plan: which candidate to pick; two lines for the most useful candidate of each goal, or with
    `every` for each candidate; as details, what the next larger runs would risk. If nothing fits, the nearest miss."""
    card = f"{plan.gpu} ({gib(plan.usable_bytes)})"
    title = f"{plan.model} on {card}"
    notes = [ViewSection("notes", plan.notes)] * bool(plan.notes)
    if not plan.candidates:
        verdict, *lines = missed(plan)
        return View(title, verdict, "no", lines, sections=notes)
    shown = plan.candidates if every else plan.candidates[: plan.useful]
    reasons = [f"{number}: {next_larger(candidate)}" for number, candidate in enumerate(shown, 1)]
    hints = ["--all: every way that fits"] * (not every)
    rows = [line for number, candidate in enumerate(shown, 1) for line in _row(number, candidate, plan)]
    return View(
        title,
        advice(shown[0]),
        shown[0].report.verdict,
        [RULE] * (not every),
        sections=[
            ViewSection(f"what {'may fit' if plan.tight else 'surely fits'} {card}", "\n".join(rows)),
            *notes,
            ViewSection("one more notch", reasons, True),
        ],
        more="; ".join([*hints, "--explain: what one more notch would risk"]),
    )


RULE = (
    "Of each goal the way that keeps least in host memory, keeps an optimizer's moments, trains most and gives up "
    "least, in this order."
)
"""The rule of `Strategy.place`, for the user."""
_WIDTHS = (80, 100)
"""Most columns of the first and of the second line of a row."""
_WHY: dict[Goal, str] = {
    "lora": "it adapts every layer, and is where to begin",
    "experts": "whole experts learn most where the data use few of them",
    "router": "it is the cheapest, and changes the model least",
}


def advice(first: Candidate) -> str:
    """Return a sentence that says to pick the first candidate, and why."""
    surely = "surely fits" if first.report.verdict == "yes" else "is expected to fit"
    left = left_in_words(first.report)
    return f"Pick 1, {first.trains}: {_WHY[first.goal]}; it {surely}, {left}."


def _row(number: int, candidate: Candidate, plan: Plan) -> Iterator[str]:
    """Yield the two lines of a candidate, at most 80 and 100 columns: number, what trains, batch (rows × tokens ×
    micro-batches), bytes needed, verdict; then optimizer, ranks, host memory, speed, steps, and what is given up."""
    train, report = candidate.config.train, candidate.report
    batch = f"{train.micro_batch} × {train.sequence_length} × {train.accumulate}"
    needs = f"{from_to(report.span.low, report.span.high)}  {report.verdict:5}"
    right = f"{batch:>15}  {needs:>26}"
    width = _WIDTHS[0] - 5 - len(right)
    yield f"{number:2}  {_cut(candidate.trains, width):{width}} {right}".rstrip()
    sizes = {axis: getattr(candidate.config.parallel, axis) for axis in ("fsdp", "ep", "pp")}
    layout = " · ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    host = f"{on_host} of host memory" if (on_host := _host(report)) else ""
    steps = "" if plan.tokens is None else counted(train.steps, "step")
    given_up = f"given up: {'; '.join(candidate.strategy.gives_up)}" if candidate.strategy.gives_up else ""
    details = [candidate.optimizer, layout, host, speed(candidate, plan.tokens), steps, given_up]
    yield f"    {_cut('; '.join(filter(None, details)), _WIDTHS[1] - 4)}"


def _cut(text: str, width: int) -> str:
    """Return the text, cut to `width` columns with an ellipsis; `--json` and `--write` give it whole."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def briefly(candidate: Candidate) -> str:
    """Format a candidate in one line, for the progress of a search: what trains, strategy, size of a micro-batch."""
    train, strategy = candidate.config.train, candidate.strategy
    what = "" if strategy.goal == "router" else f" of {candidate.amount}"
    return f"{candidate.goal}{what} by {strategy.words}, {train.micro_batch} × {train.sequence_length} tokens, fits"


def speed(candidate: Candidate, tokens: int | None) -> str:
    """Format the estimated tokens/s of a candidate, and the hours for `tokens`; empty if the speed is not known."""
    time = candidate.report.time
    return "" if time is None else f"{between(time.tokens_per_second)} tokens/s, estimated{hours(time, tokens)}"


def next_larger(candidate: Candidate) -> str:
    """Return a sentence on the next larger run of a candidate: whether it could fit, and how much memory it needs."""
    larger = candidate.next_larger
    if larger is None:
        return "nothing larger exists"
    assert larger.report is not None
    return f"{larger.what} {larger.risk}: {span_in_words(larger.report)}; {left_in_words(larger.report)}"


def missed(plan: Plan) -> Iterator[str]:
    """Yield sentences for a plan in which nothing fits: the nearest miss, what would make it fit, and larger GPUs."""
    miss, card = plan.miss, f"{plan.gpu} ({gib(plan.usable_bytes)})"
    if miss is None:
        yield f"nothing fits {card}, and no strategy could be predicted"
        return
    needs, left = span_in_words(miss.report), left_in_words(miss.report)
    surely = "" if plan.tight else " surely"
    hint = "; --tight plans what is expected to fit" if miss.report.verdict == "tight" else ""
    yield f"nothing fits {card}{surely}: the nearest miss needs {needs}; {left}{hint}"
    train = miss.config.train
    yield f"nearest: {dict(miss.report.about)['trains']}, {train.micro_batch} × {train.sequence_length} tokens"
    if miss.remedy is None:
        yield "no change of the run file is known that makes it surely fit"
    else:
        yield f"it surely fits with {_remedy(miss.remedy)}"
    if miss.cards:
        yield f"it fits {' or '.join(miss.cards)}"


def _remedy(remedy: Remedy) -> str:
    """Format a remedy as its `--set` flags, followed by the memory that the run then needs on GPU and host."""
    flags = " ".join(f"--set {flag}" for flag in remedy.flags)
    host = _host(remedy.report)
    return f"{flags}: {gib(remedy.report.required)}{host and f', {host} of host memory'}"


def _host(report: MemoryReport) -> str:
    """Format the bytes of tensors that the fullest rank of a run keeps in host memory; empty if there are none."""
    return gib(report.fullest.host_bytes) if report.fullest.host_bytes else ""
