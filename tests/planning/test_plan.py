"""A plan as a whole: its notes, its order, its rows, an end by Ctrl-C, and what several processes find."""

from dataclasses import replace
from pathlib import Path

import pytest

from moetune.config.schema import RunConfig
from moetune.planning.candidate import Candidate, NextLarger
from moetune.planning.plan import Plan, _ranked, _useful_first, plan
from moetune.planning.predictor import Predictor
from moetune.planning.savings import changed
from moetune.planning.search import Found, Search
from moetune.planning.strategies import Goal, Strategy
from moetune.planning.views import plan_view
from moetune.run.resolve import resolve
from tests.report.sample import sample
from tests.toys import toy_config


@pytest.mark.full
@pytest.mark.parametrize("every", [False, True])
def test_several_processes_find_what_one_finds(every: bool, small_model: Path) -> None:
    one, several = (plan(str(small_model), "600MiB", length=64, every=every, processes=number) for number in (1, 2))
    assert several == one
    assert one.candidates


def test_what_is_refused_for_one_reason_is_one_note(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(search: Search, tried: list[Strategy]) -> Found:
        return Found(None, tuple((strategy, "no such strategy today") for strategy in tried))

    monkeypatch.setattr(Search, "best", refuse)
    monkeypatch.setattr("moetune.planning.plan._nearest", lambda *_: None)
    refused = plan(str(small_model), "600MiB", goals=("router",), length=64)
    assert refused.notes == ("router, bf16, adamw; int8, adamw; nf4, adamw; nf4, host, adamw: no such strategy today",)
    assert not refused.candidates


@pytest.mark.parametrize("fits", [0, 1, 2, 3])
@pytest.mark.parametrize("every", [False, True])
def test_a_slower_way_is_searched_only_where_no_faster_one_fits(
    every: bool, fits: int, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Goal, int]] = []

    def best(search: Search, tried: list[Strategy]) -> Found:
        strategy = tried[0]
        asked.append((strategy.goal, strategy.slowness))
        one = candidate(strategy.goal, "adamw", 1, strategy.order)
        it_fits = strategy.slowness == (fits if strategy.goal == "lora" else 0)
        return Found(replace(one, strategy=strategy) if it_fits else None)

    monkeypatch.setattr(Search, "best", best)
    monkeypatch.setattr(Search, "reported", lambda search, one: one)
    plan(str(small_model), "24GiB", goals=("lora", "router"), length=64, every=every)
    assert {slowness for goal, slowness in asked if goal == "lora"} == set(range(fits + 1))
    assert {slowness for goal, slowness in asked if goal == "router"} == {0}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("every", [False, True])
def test_gradients_of_factors_are_freed_early_before_anything_waits_on_the_host(
    every: bool, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the fused backward is valid: 8-bit states, one micro-batch a step, no clipping by norm."""

    def best(search: Search, tried: list[Strategy]) -> Found:
        strategy = tried[-1]
        config = search.smallest(strategy)
        fits = "optimizer.fused_backward" in strategy.settings or strategy.slowness > 0
        return Found(Candidate(strategy, config, search.predictor.quick(config), 4) if fits else None)

    monkeypatch.setattr(Search, "best", best)
    found = plan(str(small_model), "24GiB", goals=("lora",), length=64, every=every, beyond=False).candidates[0]
    train, optimizer = found.config.train, found.config.optimizers["lora"]
    assert (optimizer.name, optimizer.fused_backward) == ("adamw8bit", True)
    assert (train.accumulate, train.max_grad_norm, found.config.model.experts_on) == (1, 0, "gpu")
    assert "fused backward" in found.optimizer
    assert "no accumulation and no clipping" in str(found.strategy.gives_up)


@pytest.mark.parametrize(
    ("model_type", "goal", "why"),
    [
        ("mixtral", "experts", "stages would be cut anew"),
        ("mixtral", "lora", None),
        ("granitemoehybrid", "lora", "layers with a state"),
    ],
)
def test_a_plan_for_two_cards_tries_pipelines_or_says_why_not(
    model_type: str, goal: Goal, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Strategy] = []

    def best(search: Search, strategies: list[Strategy]) -> Found:
        tried.extend(strategies)
        return Found(replace(candidate(goal, "adamw", 1, 0), strategy=strategies[0]))

    monkeypatch.setattr(Search, "best", best)
    monkeypatch.setattr(Search, "reported", lambda search, one: one)
    toy_config(model_type).save_pretrained(tmp_path / "model")
    notes = plan(str(tmp_path / "model"), "24GiB", goals=(goal,), count=2, length=64).notes
    assert any("parallel.pp" in one.layout for one in tried) == (why is None)
    said = [note for note in notes if "no pipeline" in note]
    assert len(said) == (why is not None)
    assert all(str(why) in note for note in said)


@pytest.mark.full
def test_of_ways_to_divide_a_run_over_two_cards_the_fastest_is_shown(small_model: Path) -> None:
    found = plan(str(small_model), "rtx-3090", goals=("router",), count=2, length=64, every=False, beyond=False)
    (one,) = found.candidates
    predictor, speeds = Predictor("rtx-3090"), {}
    for axes in ({"fsdp": 2, "ep": 2}, {"fsdp": 2}, {"pp": 2}):
        sizes = {f"parallel.{axis}": axes.get(axis, 1) for axis in ("fsdp", "ep", "pp")}
        more = {"parallel.stages": "auto", "train.accumulate": 2 if "pp" in axes else 1}  # of 64 rows, the most tried
        time = predictor.report(changed(one.config, sizes | more)).time
        assert time is not None
        speeds[tuple(sizes.values())] = time.tokens_per_second.middle
    shown = tuple(getattr(one.config.parallel, axis) for axis in ("fsdp", "ep", "pp"))
    assert speeds[shown] == one.speed == max(speeds.values())
    resolve(one.config, "cuda")  # as `moetune train` does


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        "granite-3.1-3b-a800m on 1 x 24GiB", "gpt-oss-20b on 1 x 24GiB", "olmoe-1b-7b on 1 x 15GiB",
        "deepseek-v2-lite on 2 x 15GiB", "mixtral-8x7b on 2 x 24GiB",
    ],
)  # fmt: skip
def test_at_full_size_a_search_of_everything_finds_nothing_more_useful(case: str) -> None:
    model, _, count, _, gpu = case.split()
    few, all_of_them = (plan(model, gpu, count=int(count), every=every) for every in (False, True))
    useful = [[(one.goal, one.config) for one in of.candidates[: of.useful]] for of in (few, all_of_them)]
    assert useful[0] == useful[1] != []


@pytest.mark.full
def test_the_run_that_nearly_fits_is_that_which_saves_most(small_model: Path) -> None:
    found = plan(str(small_model), "400MiB", goals=("router", "lora"), length=64, every=False)
    assert found.candidates == ()
    assert found.miss is not None
    strategy = found.miss.config
    assert (strategy.model.experts_on, strategy.train.checkpointing) == ("host", "offload")
    assert found.miss.report.verdict != "yes"
    assert found.miss.cards


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
    other = replace(other, next_larger=NextLarger("rank 16", other.config, other.report))
    ordered = _useful_first([one, other])
    view = plan_view(Plan("m", "44GiB", 44 << 30, tuple(ordered)), every=every)
    (rows,) = [section.body for section in view.sections if isinstance(section.body, str)]
    assert len(rows.splitlines()) == (4 if every else 2)
    assert max(map(len, rows.splitlines())) <= 100
    assert "yes" in rows.splitlines()[0]
    reasons = [*view.sections[-1].body]
    assert reasons[0] == "1: nothing larger exists"
    assert [reason.startswith("2: rank 16 ") for reason in reasons[1:]] == [True] * every
    assert ("--all: every way" in view.more) is not every
