"""What is recommended fits by trace, and a notch more does not: drawn questions, and every recipe."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from moetune.config.load import load_run_config
from moetune.config.recipes import recipes
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.planning.plan import plan
from moetune.planning.predictor import Predictor
from moetune.planning.search import Search, Solution
from moetune.planning.solve import solve
from moetune.planning.strategies import Goal, Strategy, ways
from moetune.run import validation
from tests.cli.test_commands import ROOT
from tests.thinned import thinned

FEW_EXPERTS = ("mixtral-8x7b", "phi-3.5-moe", "mixtral-8x22b")
MODELS: dict[Goal, tuple[str, ...]] = {
    "experts": FEW_EXPERTS,
    "lora": (*FEW_EXPERTS, "olmoe-1b-7b", "granite-3.1-3b-a800m", "deepseek-v2-lite", "llama-3-8b"),
    "router": (*FEW_EXPERTS, "olmoe-1b-7b", "granite-3.1-3b-a800m", "deepseek-v2-lite"),
}
"""Numbers of experts are recorded one by one, which takes minutes where there are many in a layer."""


def search_of(model: str | Path, gpu: str, length: int) -> Search:
    attention = "eager" if model == "gpt-oss-20b" else "sdpa"
    raw = {
        "model": {"path": str(model), "attention": attention},
        "adapt": {},
        "train": {"sequence_length": length},
        "hardware": {"gpu": gpu},
    }
    return Search.of(RunConfig.model_validate(raw))


def question(number: int) -> tuple[Search, Strategy]:
    """A way to a goal, for a model, a card, a number of them and a length, of which something may fit."""
    draw = random.Random(number)
    while True:
        goal = draw.choice(tuple(MODELS))
        model, gpu = draw.choice(MODELS[goal]), draw.choice(("24GiB", "44GiB", "80GiB"))
        search, count = search_of(model, gpu, draw.choice((512, 1024, 2048, 4096))), draw.choice((1, 1, 1, 1, 2))
        if there := [way for way in ways(goal, search.structure, count) if search.may_fit(way)]:
            return search, draw.choice(there)


def check(search: Search, way: Strategy) -> Solution | None:
    """What is found fits by trace, as the closed form said, and a notch more does not."""
    found = search.largest(way)
    if found is None:
        assert not search.needs.of(search.smallest(way)).fits
        return None
    sure = search.traced(found)
    if found.report.verdict == "yes":  # no false yes: the trace of that very run fits
        assert sure is not None
        assert sure.amount >= found.amount
        assert sure.config.train.micro_batch >= found.config.train.micro_batch or sure.amount > found.amount
    if sure is None:
        return None
    assert (sure.report.method, sure.report.fits) == ("trace", True)
    if sure.beyond is not None:
        assert not search.needs.traced(sure.beyond.config).fits
    return sure


@pytest.mark.full
@pytest.mark.parametrize("number", range(30))
def test_a_drawn_question(number: int) -> None:
    check(*question(number))


@pytest.mark.parametrize("goal", thinned(MODELS, always=("experts",)))
def test_a_small_question(goal: Goal, small_model: Path) -> None:
    """On a card that has little more than the smallest run needs."""
    roomy = search_of(small_model, "44GiB", 64)
    way = next(ways(goal, roomy.structure, 1))
    least = roomy.needs.of(roomy.smallest(way)).required
    search = search_of(small_model, f"{least + (1 << 20)}B", 64)
    sure = check(search, way)
    assert sure is not None
    assert sure.beyond is not None


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in recipes() if not name.startswith("tiny")])
def test_the_most_rows_of_a_recipe(name: str) -> None:
    config, needs = load_run_config(ROOT / "configs" / f"{name}.yaml"), Predictor()
    solved = solve(config, "train.micro_batch", needs)
    assert solved.at is not None
    assert solved.value >= config.train.micro_batch
    assert (solved.at.method, solved.at.fits) == ("trace", True)
    assert solved.over is not None
    assert not solved.over.fits


@pytest.mark.full
def test_several_processes_find_what_one_finds(small_model: Path) -> None:
    one, several = (plan(str(small_model), "600MiB", length=64, processes=number) for number in (1, 2))
    assert several == one
    assert one.candidates


@pytest.mark.parametrize("count", [1, 2])
def test_no_way_is_tried_that_so_many_cards_refuse(count: int, small_model: Path) -> None:
    search = search_of(small_model, "44GiB", 64)
    for goal in MODELS:
        for way in ways(goal, search.structure, count):
            assert not [*validation.unsharable_optimizers(search.smallest(way))], way.words


def test_what_is_refused_for_one_reason_is_one_note(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(search: Search, way: Strategy) -> None:
        raise UserError("no such way today")

    monkeypatch.setattr(Search, "largest", refuse)
    refused = plan(str(small_model), "600MiB", goals=("router",), length=64)
    assert refused.notes == ("router, bf16, adamw; int8, adamw; nf4, adamw; nf4, host, adamw: no such way today",)
