"""`moetune plan MODEL`: each strategy's largest run that fits, ranked; or what nearly fits."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from moetune.adapt.documents import layers_with_state
from moetune.config.load import read_run_config
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.memory.assumed_routing import UNKNOWN, AssumedRouting
from moetune.memory.report import MemoryReport
from moetune.models.catalog.gpus import Gpu, find_gpu, gpu_names
from moetune.models.source import find_model_source
from moetune.parallel.coordinates import data_ranks
from moetune.planning.candidate import Candidate
from moetune.planning.savings import Remedy, changed, fitting
from moetune.planning.search import Found, Search
from moetune.planning.strategies import GOALS, Goal, Strategy, layouts, strategies
from moetune.planning.workers import calling
from moetune.run.resolve import resolve_model
from moetune.training.trl import InTrl


@dataclass(frozen=True)
class Miss:
    """The nearest miss if nothing fits: the smallest run of the strategy with the lowest estimate of memory.

    Attributes:
        config: its configuration.
        report: its predicted memory, more than the GPU has.
        remedy: changes of the run file with which it would fit; None if none are known.
        cards: the smallest GPUs in the catalog with enough memory, up to two; also "2 × NAME" if the run fits two of
            the given GPU.
    """

    config: RunConfig
    report: MemoryReport
    remedy: Remedy | None
    cards: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        remedy = self.remedy
        return {
            "run": self.config.model_dump(mode="json", exclude_unset=True),
            "trains": dict(self.report.about)["trains"],
            "required_bytes": self.report.required,
            "required_range": self.report.span.to_json(),
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
        model: as given.
        gpu: the GPU's name, as given, or the catalog name of a `Gpu`.
        usable_bytes: bytes of the GPU that a process can use.
        candidates: the largest run of each strategy that surely fits (verdict `yes`), or with `tight` that is expected
            to fit: first the most useful one of each goal, then the others, best first.
        miss: the run that nearly fits, if there is no candidate; None if there is one, or if no run could be predicted.
        notes: messages for the user: what was left out, and why.
        tokens: the number of tokens that each candidate trains on; None if it was not given.
        tight: whether tight runs are candidates too.
        ways: number of searches that were made.
    """

    model: str
    gpu: str
    usable_bytes: int
    candidates: tuple[Candidate, ...]
    miss: Miss | None = None
    notes: tuple[str, ...] = ()
    tokens: int | None = None
    tight: bool = False
    ways: int = 0

    @property
    def useful(self) -> int:
        """Number n of goals that have candidates; the first n `candidates` are the most useful one of each goal."""
        return len({candidate.goal for candidate in self.candidates})

    def to_json(self) -> dict[str, Any]:
        """Return the object that `moetune plan MODEL --json` prints."""
        return {
            "schema": 1,
            "model": self.model,
            "gpu": {"name": self.gpu, "usable_bytes": self.usable_bytes},
            "fits": bool(self.candidates),
            "candidates": [candidate.to_json(self.tokens) for candidate in self.candidates],
            "useful": self.useful,
            "nearest_miss": None if self.miss is None else self.miss.to_json(),
            "notes": list(self.notes),
            "tokens": self.tokens,
            "ways": {"searched": self.ways, "all": self.ways},
        }


Show = Callable[[int, int, str, Candidate | None], None]
"""(searches made, all searches that have to be made, what is done now, the run that was just found) -> None. The number
of all grows where nothing fits that is fast."""


def plan(
    model: str,
    gpu: str | Gpu,
    *,
    goals: Iterable[Goal] = GOALS,
    count: int = 1,
    length: int = 1024,
    host: int | None = None,
    data: str | None = None,
    tokens: int | None = None,
    tight: bool = False,
    routing: AssumedRouting | None = None,
    trainer: InTrl | None = None,
    every: bool = True,
    beyond: bool = True,
    simulated: bool = True,
    processes: int = 1,
    show: Show = lambda *_: None,
) -> Plan:
    """Find the largest runs of a model that surely fit a GPU.

    For each goal there are strategies (settings of storage, optimizer and checkpointing; strategies.py). Those that
    keep least in host memory come first, and slower ones are searched only where no faster one fits (search.py).

    Args:
        model: a catalog name, a folder or a hub id.
        gpu: the name of a GPU, a memory size such as `44GiB`, or a catalog entry.
        goals: what to train: `router`, `experts` or `lora`.
        count: the number of GPUs that a run is divided over.
        length: tokens of a sequence.
        host: bytes of host memory that a run may take; None: what the machine of `gpu` has, if it is the one at hand,
            else no limit.
        data: the value of `data.train` in the run files; None to leave it out.
        tokens: the number of tokens to train on, from which `train.steps` follows; None to leave the steps alone.
        tight: also take runs that are expected to fit, but may need more memory than the GPU has.
        routing: how many tokens each expert is assumed to receive; None: not known.
        trainer: the trainer of TRL that the runs are for; None for moetune's own. No time is estimated then.
        every: whether the largest run of every strategy is searched; else only the most useful run of each goal.
        beyond: whether the next larger run of each candidate is predicted, `Candidate.next_larger`.
        simulated: whether the allocator is simulated, for `peak_process` of the candidates' reports; nothing else of a
            plan depends on it.
        processes: the number of processes that search at the same time.
        show: called before searches begin, and after each; by the thread of a goal.

    Raises:
        UserError: the model or the GPU is not known; the model is dense and the goal is not `lora`; or a trainer of TRL
            is to run on several GPUs.
    """
    if trainer is not None and count > 1:
        raise UserError("TRL trains a model of one rank; plan with --trainer for one GPU")
    source, card = find_model_source(model), gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
    name = gpu if isinstance(gpu, str) else gpu.name
    raw: dict[str, Any] = {
        "model": {"path": model},
        "adapt": {},
        "train": {"sequence_length": length, **({"micro_batch": 2} if trainer and trainer.trainer == "kto" else {})},
        "hardware": {"gpu": name},
    }
    if host is not None:
        raw["hardware"]["host_memory"] = f"{host}B"
    start = read_run_config(raw if data is None else raw | {"data": {"train": data}}, (), "plan")
    search = Search(start, gpu, tight, routing or UNKNOWN, trainer, simulated)
    base = source.quantization.base
    no_pipeline: dict[Goal, str] = {"experts": "its stages would be cut anew for each number of experts"}
    if count > 1 and layers_with_state(resolve_model(start.model).plain):
        no_pipeline = dict.fromkeys(GOALS, "tracing all micro-batches of layers with a state takes minutes")
    of_goals = {
        goal: [
            strategy
            for strategy in strategies(goal, search.structure, count, base, in_trl=trainer is not None)
            if goal not in no_pipeline or "parallel.pp" not in strategy.layout
        ]
        for goal in goals
        if search.structure.moe_layers or goal == "lora"
    }
    if not of_goals:
        raise UserError(f"{model!r} is a dense model: it has no routers and no experts; plan with --goal lora")
    with calling(search, processes) as call:
        results, candidates = _searched(call, of_goals, every, beyond, show, 1 if processes == 1 else len(of_goals))
    miss = None
    if not candidates:
        show(len(results), len(results), "nothing fits: looking for the nearest miss", None)
        miss = _nearest(search, of_goals)
    if tokens is not None:
        candidates = [_training_on(candidate, tokens) for candidate in candidates]
    refused: dict[tuple[Goal, str], list[str]] = {}  # (goal, reason) -> strategies
    for strategy, reason in (pair for result in results for pair in result.refused):
        refused.setdefault((strategy.goal, reason), []).append(strategy.words)
    notes = [
        f"{goal}: no pipeline was tried: {no_pipeline[goal]}; `moetune predict --set parallel.pp={count}` predicts one"
        for goal in of_goals
        if count > 1 and goal in no_pipeline
    ]
    notes += [] if trainer is None else [f"memory is that of TRL's {trainer.trainer.upper()}"]
    notes += [f"{goal}, {'; '.join(dict.fromkeys(words))}: {why}" for (goal, why), words in refused.items()]
    notes += dict.fromkeys(note for candidate in candidates for note in candidate.report.notes)
    return Plan(model, name, card.memory.value, tuple(candidates), miss, tuple(notes), tokens, tight, len(results))


def _searched(
    call: Callable[[str, Iterable[Any]], Iterator[Any]],
    of_goals: dict[Goal, list[Strategy]],
    every: bool,
    with_next: bool,
    show: Show,
    at_once: int,
) -> tuple[list[Found], list[Candidate]]:
    """Return what was found, and the candidates with their reports, as `Plan` has them; `at_once` goals are searched at
    a time.

    Of each goal strategies of equal slowness are searched, or, unless `every`, of equal costs together, those that cost
    least first, until something fits.
    """
    tried, known = list[Found](), Counter[Goal]()

    def costs(strategy: Strategy) -> tuple[int, ...]:
        return (strategy.slowness,) if every else (strategy.slowness, *strategy.costs)

    def of_goal(goal: Goal) -> tuple[list[Found], list[Candidate]]:
        results, fitting_runs = list[Found](), list[Candidate]()
        levels = groupby(sorted(of_goals[goal], key=costs), key=costs)
        while not fitting_runs and (level := next(levels, None)) is not None:
            together = groupby(level[1], key=lambda strategy: strategy.order if every else strategy.layout)
            searches = [list(group) for _, group in together]
            known[goal] += len(searches)
            show(len(tried), known.total(), goal, None)
            for result in call("best", searches):
                tried.append(result)
                results.append(result)
                show(len(tried), known.total(), goal, result.candidate)
                if result.candidate is not None:
                    fitting_runs.append(result.candidate if with_next else replace(result.candidate, next_larger=None))
        return results, [*call("reported", _ranked(fitting_runs))]

    with ThreadPoolExecutor(at_once) as threads:  # they wait for processes
        of_all = dict(zip(of_goals, threads.map(of_goal, of_goals), strict=True))
    fitting = [candidate for goal in GOALS if goal in of_all for candidate in of_all[goal][1]]
    return [result for results, _ in of_all.values() for result in results], _useful_first(fitting)


def _useful_first(candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates with the most useful one of each goal first: of LoRA, experts, routers.

    Of a goal's candidates the first is the one that `Strategy.place` puts first.
    """
    order: tuple[Goal, ...] = ("lora", "experts", "router")
    of_goals = ([run for run in candidates if run.goal == goal] for goal in order)
    useful = [
        min(of_goal, key=lambda run: run.strategy.place(run.amount, run.speed)) for of_goal in of_goals if of_goal
    ]
    return useful + [run for run in candidates if not any(run is first for first in useful)]


def _ranked(candidates: list[Candidate]) -> list[Candidate]:
    """Sort candidates, and leave out those that a better one beats.

    The order is: by goal; runs without host memory first; what trains, most first; order of the strategy; speed,
    fastest first; rows of a micro-batch, most first. A candidate is beaten by another one for the same goal, from an
    earlier strategy or a faster one that differs only in how it is divided over GPUs, that
    trains at least as much (two percent less count as equal) and costs no more (`Strategy.costs`); for LoRA and
    routers, also with at least as many rows in a micro-batch.
    """

    def sort_key(run: Candidate) -> tuple[float, ...]:
        strategy, rows = run.strategy, run.config.train.micro_batch
        return GOALS.index(run.goal), strategy.on_host, -run.amount, strategy.order, -run.speed, -rows

    def is_beaten(run: Candidate) -> bool:
        return any(
            rival.goal == run.goal
            and (rival.strategy.order, -rival.speed) < (run.strategy.order, -run.speed)
            and all(a <= b for a, b in zip(rival.strategy.costs, run.strategy.costs, strict=True))
            and int(1.02 * rival.amount) >= run.amount
            and (run.goal == "experts" or rival.config.train.micro_batch >= run.config.train.micro_batch)
            for rival in candidates
        )

    return [run for run in sorted(candidates, key=sort_key) if not is_beaten(run)]


def _training_on(candidate: Candidate, tokens: int) -> Candidate:
    """Return the candidate with as many steps as it takes to train on at least `tokens` tokens."""
    train = candidate.config.train
    step = train.micro_batch * train.accumulate * train.sequence_length * data_ranks(candidate.config.parallel)
    return replace(candidate, config=changed(candidate.config, {"train.steps": -(-tokens // step)}))


def _nearest(search: Search, of_goals: dict[Goal, list[Strategy]]) -> Miss | None:
    """Return the smallest run of the strategy that saves most memory, of the goal that then needs least; None if none
    can be predicted."""
    missed: list[tuple[RunConfig, MemoryReport]] = []
    for tried in of_goals.values():
        for strategy in reversed(tried):
            config = search.smallest(strategy)
            try:
                missed.append((config, search.predictor.report(config)))
                break
            except UserError:
                continue
    if not missed:
        return None
    config, report = min(missed, key=lambda miss: miss[1].required)
    cards = sorted((find_gpu(name) for name in gpu_names()), key=lambda card: card.memory.value)
    names = [card.full_name for card in cards if card.memory.value >= report.span.high][:2]
    if _fits_two(search, config):
        names.append(f"2 × {search.start.hardware.gpu}")
    own = search.trainer is None  # changes are known of moetune's own steps only
    remedies = fitting(config, report, search.predictor.report) if own else iter(())
    return Miss(config, report, next(remedies, None), tuple(names))


def _fits_two(search: Search, config: RunConfig) -> bool:
    """Return whether a run for one GPU would fit if it were divided over two of this GPU."""
    if config.parallel.ranks > 1:
        return False
    try:
        return search.left(search.predictor.quick(changed(config, next(layouts(search.structure, 2))))) >= 0
    except UserError:  # not every model can be divided
        return False
