"""The search finds what trying everything finds, by few predictions; what it finds fits, and a notch more does not."""

import random
from functools import cache
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.models.structure import ModelStructure
from moetune.planning.predictor import Predictor
from moetune.planning.search import ROWS, Search
from moetune.planning.strategies import GOALS, Goal, Strategy, strategies
from moetune.run import validation
from tests.thinned import thinned


def search_of(model: str | Path, gpu: str, length: int = 64) -> Search:
    raw = {"model": {"path": str(model)}, "adapt": {}, "train": {"sequence_length": length}, "hardware": {"gpu": gpu}}
    return Search(RunConfig.model_validate(raw), gpu)


@cache
def structure(model: str) -> ModelStructure:
    return search_of(model, "44GiB").structure


# --- Against exhaustive search --------------------------------------------------------------------------------------


class Arithmetic(Predictor):
    """In place of traces: a base that depends on the storage, what an expert or a rank takes by optimizer, what a
    layer's gradients take, and what a row takes."""

    def __init__(self, usable: int, draw: random.Random) -> None:
        super().__init__()
        self.usable, self.asked = usable, set[str]()
        self.each, self.a_layer = draw.uniform(1, 100), draw.uniform(0, 30)
        self.a_row, self.beside = draw.uniform(0, 200), draw.uniform(0, 500)

    def resolve(self, config: RunConfig) -> Any:
        return None

    def quick(self, config: RunConfig) -> Any:
        self.asked.add(config.model_dump_json())
        base = {"bf16": 4000, "int8": 2000, "nf4": 1000}[config.model.base]
        (optimizer,) = {one.name for one in config.optimizers.values()}
        states = {"adamw": 16, "adamw8bit": 6, "lomo": 2}[optimizer]
        amount, of_layer = 0, 0
        if (experts := config.adapt.experts) is not None:
            amount, of_layer = len(experts.layers) * len(experts.ids), len(experts.ids)
        if config.adapt.lora is not None:
            amount = config.adapt.lora.rank
        grows = amount * self.each * states
        required = base + self.beside + grows + of_layer * self.a_layer + (config.train.micro_batch - 1) * self.a_row
        parts = SimpleNamespace(
            frozen_weights=base, trainable_weights=grows, master_weights=0, optimizer_states=0, gradients=0,
            saved_activations=config.train.micro_batch * self.a_row, transient_peak=self.beside,
        )  # fmt: skip
        left = int(self.usable - required)
        fullest = SimpleNamespace(parts=parts, outside_allocator=0)
        return SimpleNamespace(headroom_bytes=left, least_headroom=left, required=required, host=None, fullest=fullest)


def of_equal_costs(goal: Goal, model: str) -> list[list[Strategy]]:
    """Of the storages and optimizers that `Arithmetic` knows."""
    there = [
        one
        for one in strategies(goal, structure(model), 1)
        if not one.slowness and "optimizer.offload" not in one.settings
    ]
    by_costs = sorted(there, key=lambda one: one.costs)
    return [list(some) for _, some in groupby(by_costs, key=lambda one: one.costs)]


def exhaustive(search: Search, tried: list[Strategy]) -> tuple[int, int, int] | None:
    """Of all strategies, sizes and rows that fit: most that trains, then what gives up least, then most rows."""
    best = None
    for strategy in tried:
        for size in search._sizes(strategy):
            config = search._run(strategy, size)
            for rows in ROWS:
                train = config.train.model_copy(update={"micro_batch": rows})
                if search.left(search.predictor.quick(config.model_copy(update={"train": train}))) >= 0:
                    here = (size.amount, -strategy.order, rows)
                    best = here if best is None else max(best, here)
    return best


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("goal", "model"), [("experts", "mixtral-8x7b"), ("lora", "mixtral-8x7b")])
def test_the_best_run_is_what_exhaustive_search_finds(goal: Goal, model: str, pytestconfig: pytest.Config) -> None:
    draw = random.Random(0)
    for _ in range(4 if pytestconfig.getoption("--all") else 1):
        for tried in of_equal_costs(goal, model):
            search = search_of(model, "44GiB")
            answers = Arithmetic(int(draw.uniform(900, 9000)), draw)
            search.__dict__["predictor"] = answers  # as `cached_property` keeps it
            found = search.best(tried).candidate
            predicted = len(answers.asked)
            assert predicted <= 16
            best = exhaustive(search, tried)
            assert (found is None) is (best is None)
            if found is not None:
                assert (found.amount, -found.strategy.order, found.config.train.micro_batch) == best


@pytest.mark.parametrize("goal", ["experts", "lora"])
def test_frozen_weights_larger_than_the_gpu_are_predicted_once(goal: Goal) -> None:
    """Other sizes and optimizers have the same frozen weights, 1,000 bytes in 4 bits."""
    predictions = []
    for usable in (999, 1000):
        search = search_of("mixtral-8x7b", "44GiB")
        answers = Arithmetic(usable, random.Random(0))
        search.__dict__["predictor"] = answers
        assert all(search.best(tried).candidate is None for tried in of_equal_costs(goal, "mixtral-8x7b"))
        predictions.append(len(answers.asked))
    assert predictions[0] == 1 < predictions[1]


def test_more_experts_come_with_more_layers_first() -> None:
    """Every number of experts that can train in equally many of the first layers, least memory first."""
    search = search_of("mixtral-8x7b", "44GiB")
    one, over_two = (next(strategies("experts", search.structure, count)) for count in (1, 2))
    sizes = search._sizes(one)
    assert [size.amount for size in sizes[:34]] == [*range(1, 33), 34, 36]
    assert [size.words for size in sizes[31:33]] == ["32 layers × 1 expert", "17 layers × 2 experts"]
    assert [size.amount for size in sizes] == sorted({size.amount for size in sizes})
    assert sizes[-1].amount == 32 * 8
    assert [size.words for size in search._sizes(over_two)][:1] == ["1 layer × 2 experts"]
    assert all(size.amount % 2 == 0 for size in search._sizes(over_two))


@pytest.mark.full
def test_what_a_model_cannot_have_is_refused_by_strategy(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = search_of(small_model, "24GiB")
    there = [one for one in strategies("lora", search.structure, 1) if not one.slowness]
    resolve = Predictor.resolve

    def refusing(predictor: Predictor, config: RunConfig) -> Any:
        if config.model.base == "bf16":
            raise UserError("no bf16 today")
        return resolve(predictor, config)

    monkeypatch.setattr(Predictor, "resolve", refusing)
    found = search.best(there)
    assert found.candidate is not None
    assert found.candidate.strategy.settings["model.base"] == "int8"
    assert {(strategy.settings["model.base"], reason) for strategy, reason in found.refused} == {
        ("bf16", "no bf16 today")
    }


# --- Against traces -------------------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("goal", thinned(GOALS, always=("experts",)))
def test_a_small_question(goal: Goal, small_model: Path) -> None:
    """On a card that has little more than the smallest run needs: what is found surely fits, and the next larger run
    does not."""
    roomy = search_of(small_model, "44GiB")
    strategy = next(strategies(goal, roomy.structure, 1))
    least = roomy.predictor.quick(roomy.smallest(strategy)).span.high
    search = search_of(small_model, f"{least + (1 << 20)}B")
    candidate = search.best([strategy]).candidate
    assert candidate is not None
    whole = search.reported(candidate)
    assert whole.report.verdict == "yes"
    assert whole.next_larger is not None
    assert whole.next_larger.to_json()["verdict"] in ("tight", "no")


@pytest.mark.parametrize("count", [1, 2])
def test_no_strategy_is_tried_that_so_many_cards_refuse(count: int, small_model: Path) -> None:
    search = search_of(small_model, "44GiB")
    for goal in GOALS:
        for strategy in strategies(goal, search.structure, count):
            assert not [*validation.unsharable_optimizers(search.smallest(strategy))], strategy.words


@pytest.mark.parametrize("goal", GOALS)
def test_a_plan_copies_experts_on_the_host_once_a_step(goal: Goal) -> None:
    """Where one micro-batch need not end before the next begins. One after the other takes less of the host."""
    model = structure("mixtral-8x22b")
    together = [one for one in strategies(goal, model, 1) if "train.layer_by_layer" in one.settings]
    assert {one.settings["train.checkpointing"] for one in together} == {"auto", "offload"}
    assert all(one.settings["model.experts_on"] == "host" for one in together)
    assert all(one.settings["train.accumulate"] > 1 for one in together)
    one_by_one = [one for one in strategies(goal, model, 1) if one.slowness == 3 and one not in together]
    assert len(one_by_one) >= len(together) // 2
    for others in (strategies(goal, model, 2), strategies(goal, model, 1, in_trl=True)):
        assert not any("train.layer_by_layer" in one.settings for one in others)
