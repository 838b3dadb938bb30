"""A plan: the largest run of each strategy that fits a card, best first; where nothing fits, the nearest miss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from moetune.config.load import read_run_config
from moetune.config.schema import RunConfig
from moetune.errors import UserError, one_line
from moetune.memory.changes import Remedy, changed, fitting
from moetune.memory.report import MemoryReport
from moetune.models.catalog.gpus import find_gpu, gpu_names
from moetune.models.source import find_model_source
from moetune.parallel.coordinates import data_ranks
from moetune.planning.search import Candidate, Search
from moetune.planning.strategies import GOALS, Goal, Strategy, layouts, strategies
from moetune.planning.workers import Workers
from moetune.run import validation
from moetune.run.source_quantization import published

SHORTEST = 1024
"""Default tokens of a sequence."""


@dataclass(frozen=True)
class Miss:
    """The run that needs least of all, by how much it does not fit, and what would make it fit.

    Attributes:
        remedy: changes of the run file; None if none are known.
        cards: the smallest with enough memory; "2 × name" if two of the given card have it.
    """

    config: RunConfig
    report: MemoryReport
    remedy: Remedy | None
    cards: tuple[str, ...]

    @property
    def trains(self) -> str:
        return dict(self.report.about)["trains"]

    def to_json(self) -> dict[str, Any]:
        remedy = self.remedy
        return {
            "run": self.config.model_dump(mode="json", exclude_unset=True),
            "trains": self.trains,
            "required_bytes": self.report.required,
            "headroom_bytes": self.report.headroom_bytes,
            "combination": remedy
            and {
                "settings": list(remedy.flags),
                "why": list(remedy.why),
                "required_bytes": remedy.report.required,
                "host_bytes": remedy.report.fullest.host_bytes,
            },
            "cards": list(self.cards),
        }


@dataclass(frozen=True)
class Plan:
    """Candidates, best first, or the nearest miss.

    Attributes:
        notes: what was left out, and why.
        tokens: how many each candidate trains on; None if that is not known.
    """

    model: str
    gpu: str
    usable_bytes: int
    candidates: tuple[Candidate, ...]
    miss: Miss | None = None
    notes: tuple[str, ...] = ()
    tokens: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the object that `moetune plan MODEL --json` prints."""
        return {
            "schema": 1,
            "model": self.model,
            "gpu": {"name": self.gpu, "usable_bytes": self.usable_bytes},
            "fits": bool(self.candidates),
            "candidates": [candidate.to_json(self.tokens) for candidate in self.candidates],
            "nearest_miss": None if self.miss is None else self.miss.to_json(),
            "notes": list(self.notes),
            "tokens": self.tokens,
        }


def plan(
    model: str,
    gpu: str,
    *,
    goals: Iterable[Goal] = GOALS,
    count: int = 1,
    length: int = SHORTEST,
    host: int | None = None,
    data: str | None = None,
    tokens: int | None = None,
    processes: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Search the strategies for each goal.

    Args:
        count: number of cards.
        length: tokens of a sequence.
        host: bytes of host memory that a run may take; None for any.
        data: data set of the run files.
        tokens: tokens to train on, which set `train.steps`.
        processes: number of processes that search (workers.py).
        say: called with what is searched next.

    Raises:
        UserError: no such model or card.
    """
    source = find_model_source(model)
    eager = {"attention": "eager"} if any(validation.unsupported_attention(source.config, "sdpa")) else {}
    raw: dict[str, Any] = {
        "model": {"path": model, **eager},
        "adapt": {},
        "train": {"sequence_length": length},
        "hardware": {"gpu": gpu},
    }
    search = Search.of(read_run_config(raw if data is None else raw | {"data": {"train": data}}, (), "plan"))
    base = published(source).base
    of_goals = [
        list(strategies(goal, search.structure, count, base)) for goal in goals if search.layers or goal == "lora"
    ]
    if not of_goals:
        raise UserError(f"{model!r} is a dense model: it has no routers and no experts; plan with --goal lora")
    candidates: list[Candidate] = []
    refused: dict[tuple[Goal, str], list[str]] = {}  # (goal, reason) -> strategies
    late: list[str] = []
    with Workers(search, processes) as workers:
        found = [one for of_goal in of_goals for one in _largest(workers, of_goal, host, refused, say)]
        for one, sure in workers.answers("traced", _ranked(found), lambda one: say(f"tracing: {one.strategy.words}")):
            if isinstance(sure, UserError):
                raise sure
            if sure is not None:
                candidates.append(sure if tokens is None else _training_on(sure, tokens))
            else:
                late.append(f"{one.goal}, {one.strategy.words}: fits by closed form and not by trace; left out")
    notes = [f"{goal}, {'; '.join(dict.fromkeys(words))}: {why}" for (goal, why), words in refused.items()]
    notes += [*late, *dict.fromkeys(note for one in candidates for note in one.report.notes)]
    miss = None
    if not candidates:
        say("nothing fits: looking for what is nearest")
        miss = _nearest(search, [one for of_goal in of_goals for one in of_goal])
    return Plan(model, gpu, search.usable, tuple(candidates), miss, tuple(notes), tokens)


def _largest(
    workers: Workers, of_goal: list[Strategy], host: int | None, refused: dict[tuple[Goal, str], list[str]],
    say: Callable[[str], None],
) -> Iterator[Candidate]:  # fmt: skip
    """Yield the largest run of each strategy for a goal; of the slow strategies only where no other fits."""
    has_found, search = False, workers.search
    for is_slow in (False, True):
        some = [one for one in of_goal if one.is_slow is is_slow and search.may_fit(one)]
        for strategy, one in workers.answers("largest", some, lambda one: say(f"{one.goal}: {one.words}")):
            if one is None:
                continue
            why = one_line(one) if isinstance(one, UserError) else f"wants more than {host or 0:,} bytes of host memory"
            if isinstance(one, UserError) or (host is not None and one.report.fullest.host_bytes > host):
                refused.setdefault((strategy.goal, why), []).append(strategy.words)
                continue
            has_found = True
            yield one
            if search.is_largest(one):  # all other strategies give up more, for nothing
                return
        if has_found:
            return


def _ranked(found: list[Candidate]) -> list[Candidate]:
    """Order by goal, then what stays on the card first, then by what trains, then by what is given up.

    A candidate that trains no more than one that gives up less, and on no more rows at once, is left out.
    """

    def place(one: Candidate) -> tuple[int, ...]:
        strategy, rows = one.strategy, one.config.train.micro_batch
        return GOALS.index(one.goal), strategy.on_host, -one.amount, strategy.order, -rows

    def is_beaten(one: Candidate) -> bool:
        return any(
            other.goal == one.goal
            and other.strategy.order < one.strategy.order
            and other.amount >= one.amount
            and other.config.train.micro_batch >= one.config.train.micro_batch
            for other in found
        )

    return [one for one in sorted(found, key=place) if not is_beaten(one)]


def _training_on(one: Candidate, tokens: int) -> Candidate:
    train = one.config.train
    step = train.micro_batch * train.accumulate * train.sequence_length * data_ranks(one.config.parallel)
    return replace(one, config=changed(one.config, {"train.steps": -(-tokens // step)}))


def _nearest(search: Search, tried: list[Strategy]) -> Miss | None:
    """Predict the smallest run of the strategy that has the lowest bound; None if none can be predicted."""
    for strategy in sorted(tried, key=lambda one: (search.bound(one, 0), one.order)):
        config = search.smallest(strategy)
        try:
            report = search.predictor.of(config)
        except UserError:
            continue
        cards = sorted((find_gpu(name) for name in gpu_names()), key=lambda card: card.memory.value)
        names = [card.full_name for card in cards if card.memory.value >= report.required][:2]
        if _fits_two(search, config):
            names.append(f"2 × {search.start.hardware.gpu}")
        return Miss(config, report, next(fitting(config, report, search.predictor.of), None), tuple(names))
    return None


def _fits_two(search: Search, config: RunConfig) -> bool:
    """Whether a run for one card fits two of them together."""
    if config.parallel.ranks > 1 or search.context >= search.usable:
        return False
    try:
        return bool(search.predictor.of(changed(config, next(layouts(search.structure, 2)))).fits)
    except UserError:  # not every model can be divided
        return False
