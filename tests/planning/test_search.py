"""The search finds what trying everything finds, and looks at few of all runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moetune.config.schema import RunConfig
from moetune.models.catalog.gpus import find_gpu
from moetune.models.structure import ModelStructure
from moetune.planning.predictor import Predictor
from moetune.planning.search import Search
from moetune.planning.strategies import Strategy, ways
from moetune.run.resolve import resolve_model


@dataclass
class Answer:
    required: int
    usable: int

    @property
    def headroom_bytes(self) -> int:
        return self.usable - self.required

    @property
    def fits(self) -> bool:
        return self.headroom_bytes >= 0


class Arithmetic:
    """In place of predictions: what arithmetic says, and what a layer's gradients take beside it."""

    def __init__(self, usable: int, beside: int, a_layer: int) -> None:
        self.usable, self.beside, self.a_layer, self.asked = usable, beside, a_layer, set()
        self.search: Any = None
        self.way: Any = None

    def of(self, config: RunConfig) -> Any:
        experts = config.adapt.experts
        assert experts is not None
        layers, each = len(experts.layers), len(experts.ids)
        self.asked.add((layers, each))
        rows = config.train.micro_batch - 1
        return Answer(
            self.search.bound(self.way, layers * each) + self.beside + self.a_layer * each + rows * 10**9, self.usable
        )


@cache
def structure(model: str) -> ModelStructure:
    return resolve_model(start(model).model).structure


def start(model: str, gpu: str = "44GiB") -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"path": model}, "adapt": {}, "hardware": {"gpu": gpu}, "train": {"sequence_length": 64}}
    )


def exhaustive(search: Search, way: Strategy) -> tuple[int, int] | None:
    """The winner of the whole grid, every point of it evaluated: what `Search.largest` has to find."""
    fits: Sequence[tuple[int, int, int]] = [
        (layers * each, -report.required, layers)
        for layers, each in search.grid()
        if (report := search.needs.of(search.config(way, search._of_experts(layers, each)))).fits
    ]
    if not fits:
        return None
    amount, _, layers = max(fits)
    return layers, amount // layers


def test_the_most_experts_is_what_exhaustive_search_finds() -> None:
    draw = random.Random(0)
    model = structure("mixtral-8x7b")
    there = [way for way in ways("experts", model, 1) if way.settings["model.base"] == "nf4"]
    for _ in range(12):
        usable = int(draw.uniform(20, 160) * 2**30)
        answers = Arithmetic(usable, int(draw.uniform(0, 3) * 2**30), int(draw.uniform(0, 2**30)))
        way = draw.choice(there)
        search = Search(start("mixtral-8x7b"), model, answers, usable)  # type: ignore[arg-type]
        answers.search, answers.way = search, way
        found = search.largest(way)
        looked_at = len(answers.asked)
        best = exhaustive(search, way)
        if found is None:
            assert best is None
            continue
        experts = found.config.adapt.experts
        assert experts is not None
        assert (len(experts.layers), len(experts.ids)) == best
        assert found.report.fits
        assert found.beyond is None or not found.beyond.report.fits
        assert looked_at < len(list(search.grid())) / 4


def test_arithmetic_bounds_what_a_run_needs(small_model: Path) -> None:
    """A way that is left out because of it could not have fitted."""
    model = structure(str(small_model))
    search = Search(start(str(small_model)), model, Predictor(), find_gpu("44GiB").memory.value)
    way = next(iter(ways("experts", model, 1)))
    config = search.smallest(way)
    assert search.bound(way, 1) <= search.needs.of(config).required


@pytest.mark.parametrize("model", ["small", pytest.param("mixtral-8x7b", marks=pytest.mark.full)])
def test_the_closed_form_of_every_point_of_the_grid_gives_the_same_winner(model: str, small_model: Path) -> None:
    """On a card that has room for half of what could train."""
    path = str(small_model) if model == "small" else model
    there, needs = structure(path), Predictor()
    for way in ways("experts", there, 1):
        if way.settings["train.checkpointing"] == "full" and way.settings["optimizer.name"] == "adamw8bit":
            break
    roomy = Search(start(path), there, needs, find_gpu("44GiB").memory.value)
    layers, each = len(roomy.layers), roomy.experts
    between = needs.of(roomy.config(way, roomy._of_experts(layers // 2, each // 2))).required
    gpu = f"{between + between // 100}B"
    search = Search(start(path, gpu), there, needs, find_gpu(gpu).memory.value)
    found = search.largest(way)
    assert found is not None
    experts = found.config.adapt.experts
    assert experts is not None
    assert (len(experts.layers), len(experts.ids)) == exhaustive(search, way)
