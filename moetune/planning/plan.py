"""`moetune plan MODEL`: the largest run of each strategy that fits a GPU, ranked; or the run that nearly fits."""

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
from moetune.planning.search import Candidate, Search, worth
from moetune.planning.strategies import GOALS, Goal, Strategy, layouts, strategies
from moetune.planning.workers import Workers


@dataclass(frozen=True)
class Miss:
    """The nearest miss if nothing fits: the smallest run of the strategy with the lowest estimate of memory.

    Attributes:
        config: the run file.
        report: its predicted memory, more than the GPU has.
        remedy: changes of the run file with which it would fit; None if none are known.
        cards: the smallest GPUs in the catalog with enough memory, up to two; also "2 × NAME" if the run fits two of
            the given GPU.
    """

    config: RunConfig
    report: MemoryReport
    remedy: Remedy | None
    cards: tuple[str, ...]

    @property
    def trains(self) -> str:
        """What trains, in words."""
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
    """The result of `plan`: candidates, best first, or the nearest miss if nothing fits.

    Attributes:
        model, gpu: as given.
        usable_bytes: bytes of the GPU that a process can use.
        candidates: the largest run of each strategy that fits, best first.
        miss: the nearest miss; None if there is a candidate, or if no run could be predicted.
        notes: messages for the user: what was left out, and why.
        tokens: the number of tokens that each candidate trains on; None if it was not given.
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
    length: int = 1024,
    host: int | None = None,
    data: str | None = None,
    tokens: int | None = None,
    processes: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Find the largest runs of a model that fit a GPU.

    For each goal, strategies (settings of storage, optimizer and checkpointing) are tried in order; see strategies.py.
    The largest run of each is found by closed form (search.py) and confirmed by a trace.

    Args:
        model: a catalog name, a folder or a hub id.
        gpu: the name of a GPU, or a memory size such as `44GiB`.
        goals: what to train: `router`, `experts` or `lora`.
        count: the number of GPUs that a run is divided over.
        length: tokens of a sequence.
        host: bytes of host memory that a run may take; None for no limit.
        data: the value of `data.train` in the run files; None to leave it out.
        tokens: the number of tokens to train on, from which `train.steps` follows; None to leave the steps alone.
        processes: the number of processes that search at the same time, this one included.
        say: called with a line of text that says what is searched next.

    Raises:
        UserError: the model or the GPU is not known; or the model is dense and the goal is not `lora`.
    """
    source = find_model_source(model)
    raw: dict[str, Any] = {
        "model": {"path": model},
        "adapt": {},
        "train": {"sequence_length": length},
        "hardware": {"gpu": gpu},
    }
    search = Search.of(read_run_config(raw if data is None else raw | {"data": {"train": data}}, (), "plan"))
    base = source.quantization.base
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
        say("nothing fits: looking for the nearest miss")
        miss = _nearest(search, [one for of_goal in of_goals for one in of_goal])
    return Plan(model, gpu, search.usable, tuple(candidates), miss, tuple(notes), tokens)


def _largest(
    workers: Workers,
    of_goal: list[Strategy],
    host: int | None,
    refused: dict[tuple[Goal, str], list[str]],
    say: Callable[[str], None],
) -> Iterator[Candidate]:
    """Yield the largest run of each strategy for a goal. Slow strategies are searched only if no other strategy fits.

    Args:
        of_goal: the strategies, best first.
        refused: receives the strategies that were left out, by goal and reason.
        host, say: as in `plan`.
    """
    has_found, search = False, workers.search

    def within(one: Candidate) -> bool:
        return host is None or one.report.fullest.host_bytes <= host

    def more_than(before: list[Candidate | UserError | None]) -> tuple[int]:
        return (max((one.amount for one in before if isinstance(one, Candidate) and within(one)), default=0),)

    for is_slow in (False, True):
        some = [one for one in of_goal if one.is_slow is is_slow and search.may_fit(one)]
        told = workers.answers("largest", some, lambda one: say(f"{one.goal}: {one.words}"), more_than)
        for strategy, one in told:
            if one is None:
                continue
            why = one_line(one) if isinstance(one, UserError) else f"needs more than {host or 0:,} bytes of host memory"
            if isinstance(one, UserError) or not within(one):
                refused.setdefault((strategy.goal, why), []).append(strategy.words)
                continue
            has_found = True
            yield one
            if search.is_largest(one):  # all later strategies give up more and cannot train more
                return
        if has_found:
            return


def _ranked(found: list[Candidate]) -> list[Candidate]:
    """Sort candidates, and leave out those that a better one beats.

    The order is: by goal; runs without host memory first; what trains, most first; order of the strategy; rows of a
    micro-batch, most first. A candidate is beaten if another one for the same goal comes from an earlier strategy and
    trains at least as much; unless what trains are experts, also on at least as many rows at once.
    """

    def place(one: Candidate) -> tuple[int, ...]:
        strategy, rows = one.strategy, one.config.train.micro_batch
        return GOALS.index(one.goal), strategy.on_host, -one.amount, strategy.order, -rows

    def is_beaten(one: Candidate) -> bool:
        return any(
            other.goal == one.goal
            and other.strategy.order < one.strategy.order
            and worth(other.amount) >= one.amount
            and (one.goal == "experts" or other.config.train.micro_batch >= one.config.train.micro_batch)
            for other in found
        )

    return [one for one in sorted(found, key=place) if not is_beaten(one)]


def _training_on(one: Candidate, tokens: int) -> Candidate:
    """Return the candidate with as many steps as it takes to train on at least `tokens` tokens."""
    train = one.config.train
    step = train.micro_batch * train.accumulate * train.sequence_length * data_ranks(one.config.parallel)
    return replace(one, config=changed(one.config, {"train.steps": -(-tokens // step)}))


def _nearest(search: Search, tried: list[Strategy]) -> Miss | None:
    """Return the smallest run of the strategy with the lowest estimate of memory (`Search.bound`).

    A strategy that cannot be predicted is skipped for the next; None if none can be predicted.
    """
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
    """Return whether a run for one GPU would fit if it were divided over two of this GPU."""
    if config.parallel.ranks > 1 or search.context >= search.usable:
        return False
    try:
        return bool(search.predictor.of(changed(config, next(layouts(search.structure, 2)))).fits)
    except UserError:  # not every model can be divided
        return False
