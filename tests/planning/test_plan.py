"""A plan as a whole: its notes, its order, its rows, an end by Ctrl-C, and what several processes find."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.planning.bounds import Bounds
from moetune.planning.candidate import Candidate, NextLarger, nearly, worth
from moetune.planning.largest import Progress, is_surpassed
from moetune.planning.plan import Plan, _ranked, _useful_first, plan
from moetune.planning.search import Search
from moetune.planning.strategies import Goal, Strategy, strategies
from moetune.planning.tables import plan_view
from tests.report.sample import sample
from tests.thinned import thinned


@pytest.mark.full
def test_several_processes_find_what_one_finds(small_model: Path) -> None:
    one, several = (plan(str(small_model), "600MiB", length=64, processes=number) for number in (1, 2))
    assert several == one
    assert one.candidates


@pytest.mark.full
def test_what_is_refused_for_one_reason_is_one_note(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(search: Search, strategy: Strategy, more_than: int) -> None:
        raise UserError("no such strategy today")

    monkeypatch.setattr(Search, "found", refuse)
    monkeypatch.setattr(Search, "known", lambda *_: None)
    refused = plan(str(small_model), "600MiB", goals=("router",), length=64)
    assert refused.notes == ("router, bf16, adamw; int8, adamw; nf4, adamw; nf4, host, adamw: no such strategy today",)


def test_ctrl_c_ends_with_what_was_found(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found_by, shown = Search.found, []

    def interrupted(search: Search, strategy: Strategy, *more: int) -> Candidate | None:
        if strategy.order:
            raise KeyboardInterrupt
        return found_by(search, strategy, *more)

    monkeypatch.setattr(Search, "found", interrupted)
    monkeypatch.setattr(Search, "known", lambda *_: None)
    monkeypatch.setattr(Search, "is_largest", lambda *_: False)
    found = plan(str(small_model), "24GiB", goals=("router",), length=64, show=lambda now: shown.append(now.searched))
    (one,) = found.candidates
    assert (one.report.method, one.report.verdict) == ("formula", "yes")
    assert one.report.unknowns[0].cause == "routing"
    assert found.interrupted
    assert (found.ways[0], found.miss) == (1, None)
    assert shown == [0, 1, 1]
    assert "1 of" in str([section.body for section in plan_view(found).sections if section.title == "interrupted"])


def test_ctrl_c_while_tracing_leaves_each_way_once(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none that does not fit by trace."""
    asked = list[Candidate]()

    def interrupted(search: Search, found: Candidate) -> None:
        asked.append(found)
        if len(asked) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Search, "traced", interrupted)
    found = plan(str(small_model), "24GiB", goals=("router", "lora"), length=64, every=True)
    assert found.interrupted
    there = [(one.goal, one.strategy.order) for one in found.candidates]
    assert len(there) == len(set(there)) > 0
    assert (asked[0].goal, asked[0].strategy.order) not in there
    assert (asked[1].goal, asked[1].strategy.order) in there


@pytest.mark.parametrize("every", [False, True])
def test_the_most_useful_of_each_goal_is_traced(
    every: bool, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced, asked = Search.traced, []

    def counted(search: Search, found: Candidate) -> Candidate | None:
        asked.append(found.goal)
        return None if len(asked) == 1 else traced(search, found)  # the first does not fit after all

    monkeypatch.setattr(Search, "traced", counted)
    found = plan(str(small_model), "24GiB", goals=("router", "lora"), length=64, every=every)
    by_trace = [one.goal for one in found.candidates if one.report.method == "trace"]
    assert sorted({*by_trace}) == sorted({one.goal for one in found.candidates})
    assert len(by_trace) == len(asked) - 1 == (len(found.candidates) if every else len({*by_trace}))
    assert [one.goal for one in found.candidates[: len({*by_trace})]] == sorted({*by_trace})
    assert sum("left out" in note for note in found.notes) == 1


@pytest.mark.parametrize("fits", [0, 1, 2, 3])
def test_a_slower_way_is_searched_only_where_no_faster_one_fits(
    fits: int, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Goal, int]] = []

    def found(search: Search, strategy: Strategy, more_than: int) -> Candidate | None:
        asked.append((strategy.goal, strategy.slowness))
        one = candidate(strategy.goal, "adamw", 1, strategy.order)
        return (
            replace(one, strategy=strategy) if strategy.slowness == (fits if strategy.goal == "lora" else 0) else None
        )

    monkeypatch.setattr(Search, "found", found)
    monkeypatch.setattr(Search, "known", lambda *_: None)  # what another test has left on disk
    monkeypatch.setattr(Bounds, "may_fit", lambda *_: True)
    monkeypatch.setattr(Search, "to_predict", lambda search, one: [])
    monkeypatch.setattr(Search, "traced", lambda search, one: one)
    plan(str(small_model), "24GiB", goals=("lora", "router"), length=64, every=True)
    assert {slowness for goal, slowness in asked if goal == "lora"} == set(range(fits + 1))
    assert {slowness for goal, slowness in asked if goal == "router"} == {0}


@pytest.mark.parametrize("fits", [False, True])
def test_a_slower_way_begins_beside_a_faster_one_in_doubt(
    fits: bool, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others with the same storage, such as with inputs on the host, wait for that. If a faster one fits, what the
    slower one has found does not count."""
    begun = tmp_path / "begun"

    def found(search: Search, strategy: Strategy, more_than: int) -> Candidate | None:
        with begun.open("a") as file:
            file.write(f"{strategy.slowness}\n")
        if not strategy.slowness:
            time.sleep(1)  # the other process is free meanwhile
        one = replace(candidate("lora", "adamw", 1, strategy.order), strategy=strategy)
        return one if fits or strategy.slowness else None

    monkeypatch.setattr(Bounds, "may_fit", lambda bounds, one: one.settings["model.base"] == "nf4")
    monkeypatch.setattr(Bounds, "is_doubtful", lambda bounds, one: not one.slowness)
    for name, value in {
        "found": found,
        "known": lambda *_: None,  # what another test has left on disk
        "to_predict": lambda search, one: [],
        "traced": lambda search, one: one,
    }.items():
        monkeypatch.setattr(Search, name, value)
    shown: list[Progress] = []
    found_by_plan = plan(str(small_model), "24GiB", goals=("lora",), length=64, processes=2, show=shown.append)
    assert shown[-1].searched == shown[-1].all  # one object, which the search keeps up to date
    assert not found_by_plan.interrupted
    assert sorted(begun.read_text().split()[:2]) == ["0", "2"]
    assert {one.strategy.slowness for one in found_by_plan.candidates} == {0 if fits else 1}


def little_more_than_the_smallest(model: Path) -> str:
    """A card on which some experts train in full with float32 master weights, but not all."""
    train = {"sequence_length": 64}
    raw = {"model": {"path": str(model)}, "adapt": {}, "train": train, "hardware": {"gpu": "24GiB"}}
    roomy = Search.of(RunConfig.model_validate(raw))
    strategy = next(strategies("experts", roomy.structure, 1))
    return f"{roomy.predictor.of(roomy.runs.smallest(strategy)).span.high + (1 << 20)}B"


def test_what_is_not_searched_would_not_be_the_most_useful(small_model: Path) -> None:
    gpu = little_more_than_the_smallest(small_model)
    few, all_of_them = (plan(str(small_model), gpu, length=64, every=every) for every in (False, True))
    assert few.skipped > all_of_them.skipped == 0
    assert few.ways[0] == few.ways[1] < all_of_them.ways[0] == all_of_them.ways[1]
    useful = [[one.config for one in of.candidates[: of.useful]] for of in (few, all_of_them)]
    assert useful[0] == useful[1]
    assert "--all: every way" in plan_view(few).more


@pytest.mark.parametrize(
    "case",
    thinned(
        [
            "granite-3.1-3b-a800m on 1 x 24GiB",
            "gpt-oss-20b on 1 x 24GiB",
            "olmoe-1b-7b on 1 x 15GiB",
            "deepseek-v2-lite on 2 x 15GiB",
            "mixtral-8x7b on 2 x 24GiB",
            "qwen3-30b-a3b on 1 x 24GiB",
            "gemma-4-26b-a4b on 2 x 24GiB",
            "qwen3-next-80b-a3b on 2 x 24GiB",
        ],
        every=4,
    ),
)
def test_at_full_size_a_search_of_everything_finds_nothing_more_useful(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By closed form; what is found is not traced."""
    model, _, count, _, gpu = case.split()
    monkeypatch.setattr(Search, "traced", lambda search, found: found)
    few, all_of_them = (plan(model, gpu, count=int(count), every=every) for every in (False, True))
    assert few.ways[0] <= all_of_them.ways[0]
    useful = [[(one.goal, one.config) for one in of.candidates[: of.useful]] for of in (few, all_of_them)]
    assert useful[0] == useful[1] != []


def test_where_what_was_found_does_not_fit_by_trace_the_others_are_searched(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced, asked = Search.traced, list[Candidate]()

    def only_lomo(search: Search, found: Candidate) -> Candidate | None:
        asked.append(found)
        return traced(search, found) if not found.strategy.has_moments else None

    monkeypatch.setattr(Search, "traced", only_lomo)
    gpu = little_more_than_the_smallest(small_model)
    found = plan(str(small_model), gpu, goals=("experts",), length=64, every=False)
    assert [one.strategy.has_moments for one in found.candidates[:1]] == [False]
    assert asked[0].strategy.has_moments
    assert found.ways[0] == found.ways[1]


def candidate(goal: Goal, name: str, amount: int, order: int, **settings: object) -> Candidate:
    raw = {"model": {"path": "m"}, "adapt": {}, "optimizer": {"name": name}, "train": {"accumulate": 1}}
    report = sample(about=(("trains", goal), ("optimizer", name)))
    settings |= {"optimizer.name": name}
    return Candidate(Strategy(goal, settings, ("x" * 300,), order), RunConfig.model_validate(raw), report, amount)


def test_a_way_with_moments_is_listed_beside_one_without_them() -> None:
    lomo, offload = candidate("experts", "lomo", 100, 2), candidate("experts", "adamw", 90, 3)
    assert _ranked([lomo, offload]) == [lomo, offload]
    assert _ranked([replace(lomo, strategy=replace(lomo.strategy, order=4)), offload])[0].amount == 100
    assert _ranked([candidate("experts", "adamw8bit", 100, 2), offload])[1:] == []


@pytest.mark.parametrize(
    ("name", "order", "most", "surpassed"),
    [
        ("adamw", 2, 102, True),  # gives up more, and two percent more are not worth it
        ("adamw", 2, 103, False),
        ("adamw", 0, 99, False),  # gives up less, and trains nearly as much
        ("adamw", 0, 97, True),
        ("adamw", 1, 100, True),  # the strategy itself
        ("lomo", 0, 500, True),
    ],
)
def test_what_cannot_be_more_useful(name: str, order: int, most: int, surpassed: bool) -> None:
    other, one = (candidate("experts", *about) for about in (("adamw", 100, 1), (name, 1, order)))
    assert is_surpassed(one.strategy, most, other) == surpassed


@pytest.mark.parametrize("count", [1, 7, 49, 50, 51, 100, 1404])
def test_nearly(count: int) -> None:
    assert worth(nearly(count)) >= count > worth(nearly(count) - 1)


def test_the_most_useful_of_each_goal_comes_first() -> None:
    """What keeps least in host memory, then moments, then most that trains, then least given up."""
    on_host = {"model.experts_on": "host"}
    lora, most, few = (candidate("experts", *one) for one in (("lomo", 76, 3), ("adamw8bit", 20, 2), ("adamw", 7, 1)))
    hosted, same, first = (
        candidate("lora", "adamw", 64, 0, **on_host),
        candidate("lora", "adamw", 64, 2),
        candidate("lora", "adamw", 64, 1),
    )
    ordered = _useful_first([lora, most, few, hosted, same, first])
    assert ordered[:2] == [first, most]
    assert len(ordered) == 6
    assert Plan("m", "44GiB", 44 << 30, tuple(ordered)).useful == 2


@pytest.mark.parametrize("every", [False, True])
def test_a_row_takes_two_lines_of_100_columns(every: bool) -> None:
    one, other = candidate("lora", "adamw", 64, 1), candidate("lora", "adamw", 8, 0)
    other = replace(other, next_larger=NextLarger("rank 16", other.config, None))  # which surely exceeds the card
    ordered = _useful_first([one, other])
    view = plan_view(Plan("m", "44GiB", 44 << 30, tuple(ordered)), every=every)
    (rows,) = [section.body for section in view.sections if isinstance(section.body, str)]
    assert len(rows.splitlines()) == (4 if every else 2)
    assert max(map(len, rows.splitlines())) <= 100
    assert "yes" in rows.splitlines()[0]
    assert [*view.sections[-1].body] == [
        "1: nothing larger exists",
        "2: rank 16 would not fit: what it stores more exceeds what is left",
    ][: 1 + every]
    assert ("--all: every way" in view.more) is not every
