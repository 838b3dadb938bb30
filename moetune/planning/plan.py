"""`moetune plan MODEL`: the largest run of each strategy that fits a GPU, ranked; or the run that nearly fits."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moetune.config.load import read_run_config
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.memory.assumed_routing import AssumedRouting
from moetune.memory.changes import Remedy, changed, fitting
from moetune.memory.report import MemoryReport
from moetune.models.catalog.gpus import Gpu, find_gpu, gpu_names
from moetune.models.source import find_model_source
from moetune.parallel.coordinates import data_ranks
from moetune.planning.candidate import Candidate, worth
from moetune.planning.largest import Progress, largest_runs
from moetune.planning.search import Search
from moetune.planning.strategies import GOALS, Goal, Strategy, layouts, strategies
from moetune.planning.workers import Workers
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

    @property
    def trains(self) -> str:
        """What trains as text, such as `LoRA rank 16 on attention, experts`."""
        return dict(self.report.about)["trains"]

    def to_json(self) -> dict[str, Any]:
        remedy = self.remedy
        return {
            "run": self.config.model_dump(mode="json", exclude_unset=True),
            "trains": self.trains,
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
        ways: (number of strategies that were searched, number of all); unequal if the search was interrupted.
        skipped: number of strategies that were not searched because they cannot be the most useful of their goal.
    """

    model: str
    gpu: str
    usable_bytes: int
    candidates: tuple[Candidate, ...]
    miss: Miss | None = None
    notes: tuple[str, ...] = ()
    tokens: int | None = None
    tight: bool = False
    ways: tuple[int, int] = (0, 0)
    skipped: int = 0

    @property
    def interrupted(self) -> bool:
        """Whether the search was interrupted, so that `candidates` are those found until then."""
        return self.ways[0] < self.ways[1]

    @property
    def useful(self) -> int:
        """Number n of goals that have candidates; the first n `candidates` are the most useful one of each goal."""
        return len({one.goal for one in self.candidates})

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
            "ways": {"searched": self.ways[0], "all": self.ways[1]},
        }


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
    processes: int = 1,
    show: Callable[[Progress], None] = lambda progress: None,
) -> Plan:
    """Find the largest runs of a model that surely fit a GPU. Ctrl-C ends the search: the plan has what was found.

    For each goal, strategies (settings of storage, optimizer and checkpointing) are tried in order; see strategies.py.
    The largest run of each is found by closed form (search.py) and confirmed by a trace.

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
        trainer: the trainer of TRL that the runs are for; None for moetune's own. Every run is traced then, which takes
            minutes, and no time is estimated.
        every: whether every strategy is searched, and every candidate confirmed by a trace. Else strategies that cannot
            be the most useful of their goal are not searched; the most useful candidate of each goal is confirmed, and
            the reports of the others are by closed form.
        processes: the number of processes that search at the same time, this one included.
        show: called with what is searched next, and with each candidate that was found.

    Raises:
        UserError: the model or the GPU is not known; the model is dense and the goal is not `lora`; or a trainer of TRL
            is to run on several GPUs.
    """
    if trainer is not None and count > 1:
        raise UserError("TRL trains a model of one rank; plan with --trainer for one GPU")
    source, card = find_model_source(model), gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
    raw: dict[str, Any] = {
        "model": {"path": model},
        "adapt": {},
        "train": {"sequence_length": length, **({"micro_batch": 2} if trainer and trainer.trainer == "kto" else {})},
        "hardware": {"gpu": gpu if isinstance(gpu, str) else gpu.name},
    }
    if host is not None:
        raw["hardware"]["host_memory"] = f"{host}B"
    start = read_run_config(raw if data is None else raw | {"data": {"train": data}}, (), "plan")
    options = (card if isinstance(gpu, Gpu) else None, tight, routing, trainer)
    search = Search.of(start, options[0], tight=tight, routing=routing, trainer=trainer)
    base = source.quantization.base
    of_goals = [
        list(strategies(goal, search.structure, count, base)) for goal in goals if search.runs.layers or goal == "lora"
    ]
    if not of_goals:
        raise UserError(f"{model!r} is a dense model: it has no routers and no experts; plan with --goal lora")
    progress = Progress(sum(search.bounds.may_fit(one) for of_goal in of_goals for one in of_goal if not one.slowness))
    candidates: list[Candidate] = []
    found: list[Candidate] = []
    refused: dict[tuple[Goal, str], list[str]] = {}  # (goal, reason) -> strategies
    unfit: list[Candidate] = []
    is_whole, rest, skipped = False, list[Candidate](), list[Strategy]()
    tried = [one for of_goal in of_goals for one in of_goal]
    try:
        with Workers(search, processes, options) as workers:
            found += largest_runs(workers, tried, refused, progress, show, None if every else skipped)
            rest = _confirm(workers, _ranked(found), candidates, unfit, progress, show, every)
            done = {one.goal for one in candidates}
            if more := [one for one in skipped if one.goal not in done]:  # what was found does not fit by trace
                skipped = [one for one in skipped if one.goal in done]
                progress.all += sum(search.bounds.may_fit(one) for one in more if not one.slowness)
                before = len(found)
                found += largest_runs(workers, more, refused, progress, show)
                rest += _confirm(workers, _ranked(found[before:]), candidates, unfit, progress, show, every)
            rest = [search.whole(one) for one in rest]
            is_whole = True
    except KeyboardInterrupt:
        known = [one.strategy for one in (*candidates, *unfit)]
        candidates += [search.whole(one) for one in _ranked(found) if one.strategy not in known]
        rest = []
    candidates = _useful_first(candidates) + rest
    if tokens is not None:
        candidates = [_training_on(one, tokens) for one in candidates]
    ways = (progress.searched, progress.searched if is_whole else max(progress.all, progress.searched + 1))
    notes = [] if trainer is None else [f"memory is that of TRL's {trainer.trainer.upper()}"]
    notes += [f"{goal}, {'; '.join(dict.fromkeys(words))}: {why}" for (goal, why), words in refused.items()]
    notes += [f"{one.goal}, {one.strategy.words}: fits by closed form and not by trace; left out" for one in unfit]
    notes += dict.fromkeys(note for one in candidates for note in one.report.notes)
    miss = None
    if not candidates and is_whole:
        show(replace(progress, now="nothing fits: looking for the nearest miss"))
        miss = _nearest(search, tried)
    name = gpu if isinstance(gpu, str) else gpu.name
    return Plan(model, name, search.usable, tuple(candidates), miss, tuple(notes), tokens, tight, ways, len(skipped))


def _confirm(
    workers: Workers,
    ranked: Sequence[Candidate],
    candidates: list[Candidate],
    unfit: list[Candidate],
    progress: Progress,
    show: Callable[[Progress], None],
    every: bool,
) -> list[Candidate]:
    """Trace the candidates `ranked`, best first; append those that fit to `candidates`, and those that do not to
    `unfit`. `progress` is kept up to date and passed to `show`.

    Returns the candidates that are not traced: none with `every`, else all but the most useful of each goal.
    """

    def begin(run: tuple[RunConfig, bool]) -> None:
        progress.now = f"tracing: {words[id(run)]}"
        show(progress)

    left = list(ranked)
    while True:
        goals = {one.goal for one in left} - {one.goal for one in candidates}
        first = _useful_first(left)[: len({one.goal for one in left})]
        now = left if every else [one for one in first if one.goal in goals]
        if not now:
            return left
        left = [one for one in left if all(one is not other for other in now)]
        runs = [(run, one) for one in now for run in workers.search.to_predict(one)]
        words = {id(run): one.strategy.words for run, one in runs}
        for _ in workers.answers("predict", [run for run, _ in runs], begin):
            pass  # what was made is on disk, where `traced` finds it
        for one, sure in workers.answers("traced", now):
            if isinstance(sure, UserError):
                raise sure
            if sure is not None:
                candidates.append(sure)
            else:
                unfit.append(one)


def _useful_first(candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates with the most useful one of each goal first: of LoRA, experts, routers.

    Of a goal's candidates the first is the one that `Strategy.place` puts first.
    """
    order: tuple[Goal, ...] = ("lora", "experts", "router")
    of_goals = ([one for one in candidates if one.goal == goal] for goal in order)
    useful = [min(of_goal, key=lambda one: one.strategy.place(one.amount)) for of_goal in of_goals if of_goal]
    return useful + [one for one in candidates if not any(one is other for other in useful)]


def _ranked(found: list[Candidate]) -> list[Candidate]:
    """Sort candidates, and leave out those that a better one beats.

    The order is: by goal; runs without host memory first; what trains, most first; order of the strategy; rows of a
    micro-batch, most first. A candidate is beaten by another one for the same goal, from an earlier strategy, that
    trains at least as much (two percent less count as equal) and costs no more (`Strategy.costs`); for LoRA and
    routers, also with at least as many rows in a micro-batch.
    """

    def place(one: Candidate) -> tuple[int, ...]:
        strategy, rows = one.strategy, one.config.train.micro_batch
        return GOALS.index(one.goal), strategy.on_host, -one.amount, strategy.order, -rows

    def is_beaten(one: Candidate) -> bool:
        return any(
            other.goal == one.goal
            and other.strategy.order < one.strategy.order
            and other.strategy.costs_no_more(one.strategy)
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
    """Return the smallest run of the strategy with the lowest estimate of memory (`Bounds.lower`).

    A strategy that cannot be predicted is skipped for the next; None if none can be predicted.
    """
    for strategy in sorted(tried, key=lambda one: (search.bounds.lower(one, 0), one.order)):
        config = search.runs.smallest(strategy)
        try:
            report = search.predictor.whole(config)
        except UserError:
            continue
        cards = sorted((find_gpu(name) for name in gpu_names()), key=lambda card: card.memory.value)
        names = [card.full_name for card in cards if card.memory.value >= report.span.high][:2]
        if _fits_two(search, config):
            names.append(f"2 × {search.start.hardware.gpu}")
        own = search.predictor.trainer is None  # changes are known of moetune's own steps only
        remedies = fitting(config, report, search.predictor.whole) if own else iter(())
        return Miss(config, report, next(remedies, None), tuple(names))
    return None


def _fits_two(search: Search, config: RunConfig) -> bool:
    """Return whether a run for one GPU would fit if it were divided over two of this GPU."""
    if config.parallel.ranks > 1 or search.context >= search.usable:
        return False
    try:
        return search.left(search.predictor.of(changed(config, next(layouts(search.structure, 2))))) >= 0
    except UserError:  # not every model can be divided
        return False
