"""`largest_runs`: the largest run of each strategy, each searched only if it may be more useful than what was found."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from moetune.errors import UserError, one_line
from moetune.planning.candidate import Candidate, nearly, worth
from moetune.planning.runs import RANKS
from moetune.planning.strategies import Goal, Strategy
from moetune.planning.workers import Workers


@dataclass
class Progress:
    """How far a plan is; passed to a function that shows it.

    Attributes:
        all: the number of strategies that may have to be searched; it falls when one makes later ones needless.
        searched: how many of them were.
        now: what is done now, in words.
        best: the last candidate that was found; None before the first.
    """

    all: int
    searched: int = 0
    now: str = ""
    best: Candidate | None = None


def largest_runs(
    workers: Workers,
    tried: Sequence[Strategy],
    refused: dict[tuple[Goal, str], list[str]],
    progress: Progress,
    show: Callable[[Progress], None],
    skipped: list[Strategy] | None = None,
) -> Iterator[Candidate]:
    """Yield the largest run of each strategy; of a goal, those of slower strategies only if no faster one fits.

    Slower strategies are searched after the faster ones of their goal, or beside one that hardly fits by its bound.

    Args:
        tried: the strategies, those of a goal best first; if some may be skipped, those that may be the most useful
            are searched first.
        refused: (goal, reason) -> strategies that cannot be predicted for it; they are added.
        show: called with `progress`, which is kept up to date, before each strategy and after each candidate.
        skipped: if given, a strategy that cannot be more useful than one that fits (`Strategy.place`) is not searched
            but added to this list.
    """
    search, bounds = workers.search, workers.search.bounds
    needless, slower = list[Strategy](), list[Strategy]()  # not searched; the second because a faster one fits
    only_highest, begun, searched, counted = (list[Strategy]() for _ in range(4))
    fitting_runs = list[Candidate]()

    def in_order(some: list[Strategy]) -> list[Strategy]:
        if skipped is None:
            return _in_turn(some)
        some = sorted(some, key=lambda one: one.place(bounds.at_most(one)))
        # one record tells whether the highest rank fits; lower ranks take more records
        of_lora = [one for one in some if one.goal == "lora"]
        highest = [replace(one) for one in of_lora if bounds.at_most(one) == RANKS[-1]]
        only_highest.extend(highest)
        return [*_in_turn([*highest, *(one for one in some if one.goal != "lora")]), *of_lora]

    def begin(one: Strategy) -> None:
        progress.now = f"{one.goal}: {one.words}"
        show(progress)

    def more_than(one: Strategy, before: list[Candidate | UserError | None]) -> tuple[int] | None:
        known = [other for other in before if isinstance(other, Candidate) and other.goal == one.goal]
        if any(other.strategy.slowness < one.slowness for other in known):
            slower.append(one)
            return None
        if skipped is not None and any(is_surpassed(one, bounds.at_most(one, known), other) for other in known):
            needless.append(one)
            return None
        # a strategy that gives up less, and costs no more, trains the most that can train
        if any(
            search.is_largest(of) and of.strategy.order < one.order and of.strategy.costs_no_more(one) for of in known
        ):
            needless.append(one)
            return None
        if one.slowness and one not in counted:
            counted.append(one)
            progress.all += 1
        begun.append(one)
        if skipped is None and one.goal == "lora":  # lower ranks are listed too: they may have more rows
            return (0,)
        least = RANKS[-2] if any(one is other for other in only_highest) else 0
        return (max((_to_exceed(one, other) for other in known), default=least),)

    def delay(one: Strategy, running: list[Strategy]) -> int | None:
        same = [other for other in running if other.goal == one.goal]
        doubtful = [other for other in same if bounds.is_doubtful(other)]
        # what one needs may tell that another cannot fit which differs in the optimizer or in checkpointing at most
        alike = [other for other in same if other.storage_and_layout == one.storage_and_layout]
        is_faster = any(other.slowness < one.slowness for other in same if other not in doubtful)
        if is_faster or any(other in doubtful for other in alike):
            return None
        none_has_ended = len(begun) == len(running)
        return 2 if alike and none_has_ended else 1 if same else 0

    levels = sorted({one.slowness for one in tried})
    fitting = [[one for one in tried if one.slowness == slowness and bounds.may_fit(one)] for slowness in levels]
    some = [one for of_level in fitting for one in in_order(of_level)]
    for strategy, one in workers.answers("found", some, begin, more_than, delay, known=search.known):
        is_copy = any(strategy is other for other in only_highest)
        if any(strategy is other for other in slower):
            continue
        if any(strategy is other for other in needless):
            if not is_copy and strategy not in searched:
                progress.all -= not strategy.slowness or strategy in counted
                if skipped is not None:
                    skipped.append(strategy)
            continue
        if is_copy and not isinstance(one, Candidate):
            continue  # it is searched again, for lower ranks
        if any(found.goal == strategy.goal and found.strategy.slowness < strategy.slowness for found in fitting_runs):
            slower.append(strategy)  # it began while a faster one was in doubt, which fits
            progress.all -= strategy in counted
            continue
        searched.append(strategy)
        progress.searched += 1
        if one is None:
            continue
        if isinstance(one, UserError):
            refused.setdefault((strategy.goal, one_line(one)), []).append(strategy.words)
            continue
        progress.best = one
        show(progress)
        fitting_runs.append(one)
        yield one


def _in_turn(tried: Iterable[Strategy]) -> list[Strategy]:
    """Return the strategies in turn: the first of each goal, then the second of each."""
    of_goals: dict[Goal, list[Strategy]] = {}
    for one in tried:
        of_goals.setdefault(one.goal, []).append(one)
    return [one for turn in zip_longest(*of_goals.values()) for one in turn if one is not None]


def is_surpassed(one: Strategy, most: int, other: Candidate) -> bool:
    """Return whether a strategy that trains `most` at most cannot be more useful than a candidate for the same goal.

    A strategy that gives up less is more useful if it trains nearly as much; one that gives up more, if it trains more
    than is `worth`.
    """
    mine, its = one.costs, other.strategy.costs
    return mine > its or (mine == its and most <= worth(_to_exceed(one, other)))


def _to_exceed(one: Strategy, other: Candidate) -> int:
    """Return the amount beyond which, by what is `worth`, a strategy has a place beside a candidate for the same goal.

    0 if the candidate costs more: it keeps more in host memory, or lacks an optimizer's moments.
    """
    if not other.strategy.costs_no_more(one):
        return 0
    if one.order >= other.strategy.order or other.amount == 0:
        return other.amount
    return max(0, nearly(nearly(other.amount)) - 1)
