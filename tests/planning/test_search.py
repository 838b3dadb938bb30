"""The search finds what trying everything finds, and predicts few of all runs; what it recommends fits by trace."""

import random
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moetune.config.schema import RunConfig
from moetune.memory.report import LoadPeaks, MemoryReport
from moetune.models.structure import ModelStructure
from moetune.planning.candidate import Candidate, worth
from moetune.planning.kept import write_beyond
from moetune.planning.predictor import Predictor
from moetune.planning.runs import RANKS
from moetune.planning.search import Search
from moetune.planning.strategies import GOALS, Goal, Strategy, strategies
from moetune.run import validation
from moetune.run.resolve import resolve_model
from tests.thinned import thinned

FEW_EXPERTS = ("mixtral-8x7b", "phi-3.5-moe", "mixtral-8x22b")
_SMALL = 6 << 20
"""Bytes by which memory may grow less than the bound: optimizer states of small factors are in 32 bits at a low rank
and in 8 at a high one, and sizes are rounded up to 512 bytes."""
MODELS: dict[Goal, tuple[str, ...]] = {
    "experts": FEW_EXPERTS,
    "lora": (*FEW_EXPERTS, "olmoe-1b-7b", "granite-3.1-3b-a800m", "deepseek-v2-lite", "llama-3-8b"),
    "router": (*FEW_EXPERTS, "olmoe-1b-7b", "granite-3.1-3b-a800m", "deepseek-v2-lite"),
}
"""Models whose every number of experts is quickly predicted, and traced."""


def search_of(model: str | Path, gpu: str, length: int = 64) -> Search:
    raw = {
        "model": {"path": str(model)},
        "adapt": {},
        "train": {"sequence_length": length},
        "hardware": {"gpu": gpu},
    }
    return Search.of(RunConfig.model_validate(raw))


# --- Against exhaustive search --------------------------------------------------------------------------------------


class Arithmetic(Predictor):
    """In place of predictions: the search's lower bound, and what a layer's gradients take beside it."""

    def __init__(self, usable: int, beside: int, a_layer: int) -> None:
        super().__init__()
        self.usable, self.beside, self.a_layer, self.asked = usable, beside, a_layer, set()
        self.bound: Any = None

    def of(self, config: RunConfig) -> Any:
        experts = config.adapt.experts
        assert experts is not None
        layers, each = len(experts.layers), len(experts.ids)
        self.asked.add((layers, each))
        rows = config.train.micro_batch - 1
        return Answer(self.bound(layers * each) + self.beside + self.a_layer * each + rows * 10**9, self.usable)


class Answer:
    def __init__(self, required: int, usable: int) -> None:
        self.required, self.headroom_bytes = required, usable - required

        self.least_headroom, self.host = self.headroom_bytes, None
        self.load, self.fullest, self.moment = LoadPeaks(0, 0), SimpleNamespace(peak_allocated=required), None

    @property
    def fits(self) -> bool:
        return self.headroom_bytes >= 0


@cache
def structure(model: str) -> ModelStructure:
    return resolve_model(search_of(model, "44GiB").start.model).structure


def grid(search: Search) -> list[tuple[int, int]]:
    return [(layers + 1, each + 1) for layers in range(len(search.runs.layers)) for each in range(search.runs.experts)]


def exhaustive(search: Search, strategy: Strategy) -> tuple[int, int] | None:
    """Layers and experts of each, by prediction of the whole grid."""
    reports = {one: search.predictor.of(search.runs.of_experts(strategy, *one)) for one in grid(search)}
    fits = [
        (layers * each, -reports[layers, each].required, layers)
        for layers, each in reports
        if reports[layers, each].least_headroom >= 0
    ]
    if not fits:
        return None
    amount, _, layers = max(fits)
    return layers, amount // layers


def found_by(search: Search, strategy: Strategy) -> tuple[int, int] | None:
    found = search.largest(strategy)
    if found is None:
        return None
    assert found.report.least_headroom >= 0
    larger = found.next_larger
    assert larger is None or (larger.report is not None and larger.report.least_headroom < 0)
    experts = found.config.adapt.experts
    assert experts is not None
    return len(experts.layers), len(experts.ids)


def test_the_most_experts_is_what_exhaustive_search_finds() -> None:
    draw, model = random.Random(0), structure("mixtral-8x7b")
    there = [one for one in strategies("experts", model, 1) if one.settings["model.base"] == "nf4"]
    start = search_of("mixtral-8x7b", "44GiB").start
    for _ in range(12):
        usable, strategy = int(draw.uniform(20, 160) * 2**30), draw.choice(there)
        answers = Arithmetic(usable, int(draw.uniform(0, 3) * 2**30), int(draw.uniform(0, 2**30)))
        search = Search(start, model, answers, usable)
        answers.bound = lambda count, search=search, strategy=strategy: search.bounds.lower(strategy, count)
        found, predicted = found_by(search, strategy), len(answers.asked)
        best = exhaustive(search, strategy)
        assert (found is None) is (best is None)
        if found is None or best is None:
            continue
        assert found == best or worth(found[0] * found[1]) >= best[0] * best[1]
        assert predicted < len(grid(search)) / 4


@pytest.mark.parametrize(("model", "depths"), [("gemma-4-26b-a4b", 5), ("gpt-oss-20b", 11)])
def test_where_layers_alternate_few_numbers_of_layers_are_tried(model: str, depths: int) -> None:
    """All layers train, with as many experts of each as fit; where one fits, the best of few numbers of layers."""
    draw, its = random.Random(0), structure(model)
    there = [one for one in strategies("experts", its, 1, "nf4") if one.settings["model.base"] == "nf4"]
    start = search_of(model, "44GiB").start
    for free in (0.02, 0.05, 0.3, 1.5, 4, 9, 25):
        strategy = draw.choice(there)
        answers = Arithmetic(0, int(draw.uniform(0, 3) * 2**30), int(draw.uniform(0, 2**25)))
        unlimited = Search(start, its, answers, 1 << 50)
        usable = unlimited.bounds.lower(strategy, 0) + answers.beside + int(free * 2**30)
        search = Search(start, its, answers, usable)
        answers.usable, answers.bound = (
            usable,
            lambda count, search=search, strategy=strategy: search.bounds.lower(strategy, count),
        )
        assert len(search.depths) == depths
        layers, tried = len(search.runs.layers), search.depths
        few = search.predictor.of(search.runs.of_experts(strategy, layers, 2))
        expected = _best(search, strategy, [layers] if few.fits else tried)
        answers.asked.clear()
        found = search.largest(strategy)
        assert worth(0 if found is None else found.amount) >= expected
        assert {layers for layers, _ in answers.asked} <= set(tried)


def test_a_run_of_very_many_experts_each_alone_is_not_traced(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = search_of(small_model, "24GiB")
    tried = [one for one in strategies("experts", search.structure, 1) if "optimizer.offload" not in one.settings]
    there = {one.settings["optimizer.name"]: one for one in tried}
    runs = {name: search.runs.of_experts(one, len(search.runs.layers), 2) for name, one in there.items()}
    monkeypatch.setattr("moetune.planning.predictor._MOST_ALONE", 1)
    assert {name for name, run in runs.items() if search.predictor.takes_minutes(run)} == {"lomo"}
    report = search.predictor.of(runs["lomo"])
    found = search.traced(Candidate(there["lomo"], runs["lomo"], report, 2 * len(search.runs.layers)))
    assert found is not None
    assert found.report.method == "formula"
    assert "takes minutes" in found.report.notes[-1]


def _best(search: Search, strategy: Strategy, depths: list[int]) -> int:
    """The most experts that fit, by prediction of every number of them at these numbers of layers."""
    runs = [(layers, each + 1) for layers in depths for each in range(search.runs.experts)]
    fits = (
        layers * each
        for layers, each in runs
        if search.predictor.of(search.runs.of_experts(strategy, layers, each)).fits
    )
    return max(fits, default=0)


@pytest.mark.full
@pytest.mark.parametrize("model", ["small", pytest.param("mixtral-8x7b", marks=pytest.mark.full)])
def test_the_closed_form_of_every_point_of_the_grid_gives_the_same_winner(model: str, small_model: Path) -> None:
    """On a card that has room for half of what could train."""
    path = str(small_model) if model == "small" else model
    roomy = search_of(path, "44GiB")
    strategy = next(
        one for one in strategies("experts", roomy.structure, 1) if one.settings["optimizer.name"] == "adamw8bit"
    )
    half = roomy.runs.of_experts(strategy, len(roomy.runs.layers) // 2, roomy.runs.experts // 2)
    required = roomy.predictor.of(half).span.high
    search = search_of(path, f"{required + required // 100}B")
    assert found_by(search, strategy) == exhaustive(search, strategy)


def test_arithmetic_bounds_what_a_run_needs(small_model: Path) -> None:
    """A strategy that is left out because of it could not have fitted: for each base and each optimizer."""
    search = search_of(small_model, "44GiB")
    there = [one for one in strategies("experts", search.structure, 1) if one.settings["train.checkpointing"] == "auto"]
    of_nf4 = [one for one in there if one.settings["model.base"] == "nf4"]
    for strategy in (*there[::4], *of_nf4):
        run = search.runs.of_experts(strategy, len(search.runs.layers), 2)
        needed = search.predictor.of(run).required
        assert search.bounds.lower(strategy, 2 * len(search.runs.layers)) <= needed, strategy.words


@pytest.mark.parametrize("count", [1, 2])
def test_arithmetic_bounds_what_a_rank_needs(count: int, small_model: Path) -> None:
    """On one GPU nothing is missing of factors, gradients and states but AdamW's step counts, and that small tensors
    have states in 32 bits."""
    search = search_of(small_model, "44GiB")
    there = [one for one in strategies("lora", search.structure, count) if not one.slowness]
    for strategy in there:
        report = search.predictor.of(search.runs.of_rank(strategy, 64))
        parts, bound = report.fullest.parts, search.bounds.lower(strategy, 64)
        stored = parts.trainable_weights + parts.gradients + parts.optimizer_states
        assert bound <= report.required, strategy.words
        missing = stored - (bound - search.bounds.lower(strategy, 0))
        assert missing >= 0
        assert count > 1 or missing < (1024 if strategy.settings["optimizer.name"] == "adamw" else stored // 10)
        assert search.bounds.at_most(strategy) == 64


@pytest.mark.parametrize("case", ["small on 1", "small on 2", *thinned(["mixtral-8x7b on 1", "mixtral-8x7b on 2"])])
def test_a_higher_rank_needs_no_less_than_the_bound_grows(case: str, small_model: Path) -> None:
    model, _, count = case.split()
    search = search_of(small_model if model == "small" else model, "44GiB")
    for strategy in strategies("lora", search.structure, int(count)):
        needs = [search.predictor.of(search.runs.of_rank(strategy, rank)).span.high for rank in RANKS]
        least = [search.bounds.lower(strategy, rank) for rank in RANKS]
        for lower, higher in combinations(range(len(RANKS)), 2):
            grows = least[higher] - least[lower]
            assert 0 < grows <= needs[higher] - needs[lower] + _SMALL, (strategy.words, RANKS[lower], RANKS[higher])


def test_a_rank_that_surely_exceeds_is_not_predicted_in_the_search(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search leaves its report out; `traced` fills it in."""
    monkeypatch.setattr("moetune.planning.bounds.UNSURE", 0)
    roomy = search_of(small_model, "44GiB")
    strategy = next(strategies("lora", roomy.structure, 1))
    needs, asked = roomy.predictor.of(roomy.runs.of_rank(strategy, 16)).span.high, list[int]()
    search = search_of(small_model, f"{needs + (1 << 16)}B")
    of = Predictor.of

    def counted(predictor: Predictor, config: RunConfig) -> MemoryReport:
        assert config.adapt.lora is not None
        assert isinstance(config.adapt.lora.rank, int)
        asked.append(config.adapt.lora.rank)
        return of(predictor, config)

    monkeypatch.setattr(Predictor, "of", counted)
    monkeypatch.setattr("moetune.planning.search.probed_ranks", lambda run: None)  # each rank has a record of its own
    found = search.largest(strategy)
    assert found is not None
    assert (found.amount, found.next_larger and found.next_larger.what) == (16, "rank 32")
    assert found.next_larger is not None
    assert found.next_larger.report is None
    assert found.next_larger.to_json() == {
        "what": "rank 32", "required_bytes": None, "required_range": None, "verdict": "no",
    }  # fmt: skip
    assert 32 not in asked
    assert [is_traced for _, is_traced in search.to_predict(found)] == [True, False]
    sure = search.traced(found)
    assert sure is not None
    assert sure.next_larger is not None
    assert sure.next_larger.report is not None
    assert sure.next_larger.report.span.high > search.usable
    assert 32 not in asked
    assert search.whole(found).next_larger == found.next_larger
    report = found.report
    assert report.moment is not None
    for unlike in (
        replace(report, moment=None),
        replace(report, moment=replace(report.moment, phase="generation")),
        replace(report, load=LoadPeaks(0, report.fullest.peak_allocated)),
    ):
        assert not search.bounds.exceeds(strategy, 32, 16, unlike)
    assert search.bounds.exceeds(strategy, 32, 16, report)


@pytest.mark.parametrize(
    "case", thinned(["qwen3-30b-a3b on 24GiB", "deepseek-v2-lite on 15GiB", "mixtral-8x7b on 30GiB"])
)
def test_what_fits_bounds_what_fits_with_another_optimizer(case: str) -> None:
    """Of strategies that differ in the optimizer only, what each finds is no more than any other allows."""
    model, gpu = case.split(" on ")
    search = search_of(model, gpu, 1024)
    alike = [
        one
        for one in (*strategies("experts", search.structure, 1), *strategies("lora", search.structure, 1))
        if (one.settings["model.base"], one.slowness) == ("nf4", 0)
    ]
    found = [one for one in map(search.found, alike) if one is not None]
    assert any(search.bounds.beyond(one) for one in found)
    pairs = [(one, other) for one in found for other in found if one.strategy.differs_in_optimizer(other.strategy)]
    assert len({one.strategy.order for one, _ in pairs}) > 2
    for one, other in pairs:
        assert one.amount <= search.bounds.at_most(one.strategy, [other]) <= search.bounds.at_most(one.strategy)


@pytest.mark.parametrize("case", thinned(["mixtral-8x7b on 2 x 24GiB", "kimi-linear-48b-a3b on 2 x 15GiB"], every=2))
def test_what_is_known_of_one_optimizer_excludes_no_other_that_fits(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near the card, some strategies are left out without a prediction of their own, and none of these fits."""
    monkeypatch.setenv("MOETUNE_CACHE", str(tmp_path))
    model, _, count, _, gpu = case.split()
    search = search_of(model, gpu, 1024)
    there = [
        one for goal in GOALS for one in strategies(goal, search.structure, int(count)) if search.bounds.may_fit(one)
    ]
    of, asked, excluded = Predictor.of, list[RunConfig](), 0
    monkeypatch.setattr(Predictor, "of", lambda predictor, config: asked.append(config) or of(predictor, config))
    for strategy in there:
        asked.clear()
        if search._exceeds(strategy):
            excluded += not asked
            assert search.left(of(search.predictor, search.runs.smallest(strategy))) < 0, strategy.words
    assert excluded > 2


@pytest.mark.parametrize("model", ["small", *thinned(("gpt-oss-20b", "kimi-linear-48b-a3b", "deepseek-v3"))])
def test_the_bound_counts_the_weights_as_they_are_stored(model: str, small_model: Path) -> None:
    """With scales, and what is not quantized: nothing is missing but tables of the layers and of dequantization."""
    search = search_of(small_model if model == "small" else model, "44GiB")
    its = resolve_model(search.start.model)
    published = its.source.quantization.base
    on_gpu = [one for one in strategies("router", search.structure, 1, published) if not one.slowness]
    assert {one.settings["model.base"] for one in on_gpu} >= {published or "nf4"}
    for strategy in on_gpu:
        parts = search.predictor.of(search.runs.smallest(strategy)).fullest.parts
        tables = parts.frozen_weights + parts.trainable_weights - (search.bounds.lower(strategy, 0) - search.context)
        assert 0 <= tables < 4096 * len(its.plain.state_dict()), strategy.words


# --- Against traces -------------------------------------------------------------------------------------------------


def question(number: int) -> tuple[Search, Strategy]:
    """Draw a strategy for a model, a card, a number of them and a length, of which something may fit."""
    draw = random.Random(number)
    while True:
        goal = draw.choice(tuple(MODELS))
        model, gpu = draw.choice(MODELS[goal]), draw.choice(("24GiB", "44GiB", "80GiB"))
        search, count = search_of(model, gpu, draw.choice((512, 1024, 2048, 4096))), draw.choice((1, 1, 1, 1, 2))
        if there := [one for one in strategies(goal, search.structure, count) if search.bounds.may_fit(one)]:
            return search, draw.choice(there)


def check(search: Search, strategy: Strategy) -> Candidate | None:
    """What is found fits by trace, as the closed form said, and the next larger run does not."""
    found = search.largest(strategy)
    if found is None:
        assert search.predictor.of(search.runs.smallest(strategy)).verdict != "yes"
        return None
    sure = search.traced(found)
    if found.report.verdict == "yes":  # no false yes: the trace of that very run fits
        assert sure is not None
        assert sure.amount >= found.amount
        assert sure.config.train.micro_batch >= found.config.train.micro_batch or sure.amount > found.amount
    if sure is None:
        return None
    assert (sure.report.method, sure.report.verdict) == ("trace", "yes")
    if sure.next_larger is not None:
        assert sure.next_larger.report is not None
        assert search.predictor.traced(sure.next_larger.config).verdict == sure.next_larger.report.verdict != "yes"
    return sure


@pytest.mark.full
@pytest.mark.parametrize("number", range(30))
def test_a_drawn_question(number: int) -> None:
    check(*question(number))


@pytest.mark.parametrize("goal", thinned(MODELS, always=("experts",)))
def test_a_small_question(goal: Goal, small_model: Path) -> None:
    """On a card that has little more than the smallest run needs."""
    roomy = search_of(small_model, "44GiB")
    strategy = next(strategies(goal, roomy.structure, 1))
    least = roomy.predictor.of(roomy.runs.smallest(strategy)).span.high
    sure = check(search_of(small_model, f"{least + (1 << 20)}B"), strategy)
    assert sure is not None
    assert sure.next_larger is not None


@pytest.mark.parametrize("count", [1, 2])
def test_no_strategy_is_tried_that_so_many_cards_refuse(count: int, small_model: Path) -> None:
    search = search_of(small_model, "44GiB")
    for goal in MODELS:
        for strategy in strategies(goal, search.structure, count):
            assert not [*validation.unsharable_optimizers(search.runs.smallest(strategy))], strategy.words


def test_experts_of_which_none_fits_tell_it_of_other_optimizers(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOETUNE_CACHE", str(tmp_path))
    monkeypatch.setattr("moetune.planning.bounds._UNLIKE", 0)
    roomy = search_of(small_model, "44GiB")
    there = [one for one in strategies("experts", roomy.structure, 1) if one.settings["model.base"] == "nf4"]
    other, one = (next(of for of in there if of.settings["optimizer.name"] == name) for name in ("adamw", "adamw8bit"))
    needs = roomy.predictor.of(roomy.runs.smallest(one)).span.high
    search = search_of(small_model, f"{needs - (1 << 16)}B")
    assert not search.bounds.is_doubtful(other)
    assert not search._exceeds(other)
    assert search.largest(one) is None
    monkeypatch.setattr(Predictor, "of", None)  # nothing is predicted
    assert search._exceeds(other)


def test_what_a_larger_run_needs_excludes_no_smaller_one(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What grows with the rank and is not in the bound, such as gathered factors, is less in a smaller run."""
    monkeypatch.setenv("MOETUNE_CACHE", str(tmp_path))
    search = search_of(small_model, "44GiB")
    one, *others = strategies("lora", search.structure, 1)
    other = next(other for other in others if other.differs_in_optimizer(one))
    least, most = (search.bounds.lower(other, rank) for rank in (RANKS[0], RANKS[-1]))
    too_much = search.usable - least + (most - least) // 2
    write_beyond(search._about, one, RANKS[-1], too_much)
    assert not search._exceeds(other)
    write_beyond(search._about, one, RANKS[0], too_much)
    assert search._exceeds(other)
    write_beyond(search._about, one, RANKS[-1], 1)  # the smallest run's is kept
    assert search._exceeds(other)
    monkeypatch.setenv("MOETUNE_CACHE", str(tmp_path / "other"))
    write_beyond(search._about, one, RANKS[-1], search.usable - least + 2 * (most - least))
    assert search._exceeds(other)
