"""A plan: for each way to a goal the most that fits a card, best first; where nothing does, what is nearest to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from moetune.config.load import read_run_config
from moetune.config.schema import RunConfig
from moetune.errors import UserError, one_line
from moetune.memory.about import optimizers, trains
from moetune.memory.changes import Combination, changed, fitting
from moetune.memory.report import MemoryReport
from moetune.models.catalog.gpus import find_gpu, gpu_names
from moetune.models.source import find_model_source
from moetune.parallel.coordinates import data_ranks
from moetune.planning.predictor import Predictor
from moetune.planning.search import NextLarger, Search, Solution
from moetune.planning.strategies import GOALS, Goal, Strategy, layouts, ways
from moetune.planning.workers import Workers
from moetune.run import validation

SHORTEST = 1024
"""Tokens of a sequence, unless asked otherwise."""


@dataclass(frozen=True)
class Candidate:
    """A run that fits.

    Attributes:
        trains, optimizer, gives_up: in words.
        report: traced, if the plan was to be sure.
        beyond: a notch more of the same, and what that needs, which is too much; None if there is no more.
    """

    goal: Goal
    config: RunConfig
    trains: str
    optimizer: str
    gives_up: tuple[str, ...]
    amount: int
    report: MemoryReport
    beyond: NextLarger | None

    def to_json(self, tokens: int | None = None) -> dict[str, Any]:
        time = self.report.time
        return {
            "goal": self.goal,
            "run": self.config.model_dump(mode="json", exclude_unset=True),
            "trains": self.trains,
            "gives_up": list(self.gives_up),
            "peak_process": self.report.peak_process,
            "required_bytes": self.report.required,
            "headroom_bytes": self.report.headroom_bytes,
            "host_bytes": self.report.fullest.host_bytes,
            "fullest_phase": None if self.report.moment is None else self.report.moment.phase,
            "method": self.report.method,
            "verdict": self.report.verdict,
            "fits": self.report.fits,
            "tokens_per_second_estimate": None if time is None else time.tokens_per_second.middle,
            "tokens_per_second": None if time is None else time.tokens_per_second.to_json(),
            "hours": None if time is None or tokens is None else time.hours(tokens).to_json(),
            "beyond": None
            if self.beyond is None
            else {"what": self.beyond.what, "required_bytes": self.beyond.report.required},
        }


@dataclass(frozen=True)
class Miss:
    """The run that is nearest to fitting, by how much it does not, and what would make it fit.

    Attributes:
        trains: what it would train, in words.
        combination: changes of the run file; None if none are known.
        cards: the smallest that have the memory it needs; "2 × name" if two of the card that was asked for have it.
    """

    config: RunConfig
    trains: str
    report: MemoryReport
    combination: Combination | None
    cards: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.config.model_dump(mode="json", exclude_unset=True),
            "trains": self.trains,
            "required_bytes": self.report.required,
            "headroom_bytes": self.report.headroom_bytes,
            "combination": None
            if self.combination is None
            else {
                "settings": list(self.combination.flags),
                "why": list(self.combination.why),
                "required_bytes": self.combination.report.required,
                "host_bytes": self.combination.report.fullest.host_bytes,
            },
            "cards": list(self.cards),
        }


@dataclass(frozen=True)
class Plan:
    """Candidates best first; without any, what misses least. `notes` say what was left out, and why; `tokens`
    of the data, if known: how many each is to train on."""

    model: str
    gpu: str
    usable_bytes: int
    candidates: tuple[Candidate, ...]
    miss: Miss | None = None
    notes: tuple[str, ...] = ()
    tokens: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The object that `moetune plan MODEL --json` prints."""
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
    """Searches the ways to each goal.

    Args:
        count: of such cards.
        length: tokens of a sequence.
        host: bytes of host memory that a run may take; None for any.
        data: what the run files train on.
        tokens: of it that they train on, which says how many steps they take; None leaves that to the run file.
        processes: that look at ways at once (workers.py).
        say: is told what is looked at.

    Raises:
        UserError: no such model or card.
    """
    source = find_model_source(model)
    eager = {"attention": "eager"} if any(validation.of_attention(source.config, "sdpa")) else {}
    start = read_run_config(
        {
            "model": {"path": model, **eager},
            "adapt": {},
            "train": {"sequence_length": length},
            "hardware": {"gpu": gpu},
            **({} if data is None else {"data": {"train": data}}),
        },
        (),
        "plan",
    )
    search = Search.of(start)
    found: list[Solution] = []
    tried: list[Strategy] = []
    candidates: list[Candidate] = []
    notes: list[str] = []
    refused: dict[tuple[Goal, str], list[str]] = {}  # by goal and reason
    with Workers(search, processes) as workers:
        for goal in goals:
            if goal != "lora" and not search.layers:
                continue
            tried += (all_ways := list(ways(goal, search.structure, count, source.quantization.base)))
            possible = [way for way in all_ways if search.may_fit(way)]
            for is_slow in (False, True):
                some = [way for way in possible if _is_slow(way) is is_slow]
                for way, one in workers.answers("largest", some, lambda way: say(f"{way.goal}: {way.words}")):
                    if isinstance(one, UserError):
                        refused.setdefault((goal, one_line(one)), []).append(way.words)
                    elif one is not None and host is not None and one.report.fullest.host_bytes > host:
                        why = f"wants more than {host:,} bytes of host memory"
                        refused.setdefault((goal, why), []).append(way.words)
                    elif one is not None:
                        found.append(one)
                        if search.is_all(one):  # all other ways give up more, for nothing
                            break
                if any(one.way.goal == goal for one in found):
                    break
        if not tried:
            raise UserError(f"{model!r} is a dense model: it has no routers and no experts; plan with --goal lora")
        for one, sure in workers.answers("traced", _ranked(found), lambda one: say(f"tracing: {one.way.words}")):
            if isinstance(sure, UserError):
                raise sure
            if sure is not None:
                candidates.append(_candidate(sure, search.needs, tokens))
            else:
                notes.append(f"{one.way.goal}, {one.way.words}: fits by closed form and not by trace; left out")
    notes = [f"{goal}, {'; '.join(dict.fromkeys(words))}: {why}" for (goal, why), words in refused.items()] + notes
    notes += dict.fromkeys(note for one in candidates for note in one.report.notes)
    miss = None if candidates else _nearest(search, tried, say)
    return Plan(model, gpu, search.usable, tuple(candidates), miss, tuple(notes), tokens)


def _is_slow(way: Strategy) -> bool:
    """Whether it is tried only where nothing else fits: all but an optimizer on the host, which can be worth it."""
    return way.settings.get("model.experts_on") == "host" or way.settings["train.checkpointing"] == "offload"


def _ranked(found: Iterable[Solution]) -> list[Solution]:
    """Goal by goal; what stays on the card first, then what trains most, then what gives up least. A way that trains no
    more than one that gives up less, and at no more tokens at once, is left out."""
    ranked: list[Solution] = []
    for one in sorted(
        found,
        key=lambda f: (GOALS.index(f.way.goal), f.way.on_host, -f.amount, f.way.order, -f.config.train.micro_batch),
    ):
        beaten = any(
            other.way.goal == one.way.goal
            and other.way.order < one.way.order
            and other.amount >= one.amount
            and other.config.train.micro_batch >= one.config.train.micro_batch
            for other in found
        )
        if not beaten:
            ranked.append(one)
    return ranked


def _candidate(one: Solution, needs: Predictor, tokens: int | None) -> Candidate:
    run, config = needs.resolve(one.config), one.config
    what = "; ".join(trains(run))
    if tokens is not None:
        train = config.train
        step = train.micro_batch * train.accumulate * train.sequence_length * data_ranks(config.parallel)
        config = changed(config, {"train.steps": -(-tokens // step)})
    return Candidate(one.way.goal, config, what, optimizers(run), one.way.gives_up, one.amount, one.report, one.beyond)


def _fits_two(search: Search, config: RunConfig) -> bool:
    """Whether a run for one card fits two of them together."""
    if config.parallel.ranks > 1 or search.context >= search.usable:
        return False
    divided = changed(config, next(layouts(search.structure, 2)))
    try:
        return bool(search.needs.of(divided).fits)
    except UserError:  # not every model can be divided
        return False


def _nearest(search: Search, tried: list[Strategy], say: Callable[[str], None]) -> Miss | None:
    """The way that needs least at its smallest, by arithmetic; it is looked at."""
    say("nothing fits: looking for what is nearest")
    for way in sorted(tried, key=lambda way: (search.bound(way, 0), way.order)):
        config = search.smallest(way)
        try:
            report = search.needs.of(config)
        except UserError:
            continue
        together = next(fitting(config, report, search.needs.of), None)
        larger = sorted((find_gpu(name) for name in gpu_names()), key=lambda card: card.memory.value)
        cards = [card.full_name for card in larger if card.memory.value >= report.required][:2]
        if _fits_two(search, config):
            cards.append(f"2 × {search.start.hardware.gpu}")
        what = "; ".join(trains(search.needs.resolve(config)))
        return Miss(config, what, report, together, tuple(cards))
    return None
