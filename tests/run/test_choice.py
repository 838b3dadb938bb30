"""The rules by which scores choose experts, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from moetune.config.schema import AdaptConfig, ChoiceConfig, LoraConfig, RunConfig
from moetune.errors import UserError, raise_problems
from moetune.models.selection import select
from moetune.models.structure import ModelStructure, meta_model, read_structure
from moetune.run.choice import choose, coverage, resolve_choices
from moetune.run.resolve import examine, resolve
from moetune.run.scores import read_scores, scores_of_model
from tests import small
from tests.resolved import build
from tests.routing.made import write_scores
from tests.toys import EXPERTS, LAYERS, toy_config

TOKENS = {0: [5, 40, 5, 20, 10, 10, 5, 5], 1: [30, 0, 0, 0, 25, 25, 10, 10]} | {
    layer: [10] * EXPERTS for layer in range(2, LAYERS)
}


@pytest.fixture(scope="module")
def mixtral() -> ModelStructure:
    return read_structure(meta_model(toy_config("mixtral")))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_scores(
        tmp_path / "scores.json",
        TOKENS,
        weight_sum=TOKENS | {0: [9, 1, 8, 2, 0, 0, 0, 0]},
        reap=TOKENS | {0: [0, 1, 2, 3, 4, 5, 6, 7]},
    )


def choice(file: Path, **settings: Any) -> ChoiceConfig:
    return ChoiceConfig.model_validate({"from": str(file), **settings})


def chosen(file: Path, structure: ModelStructure, **settings: Any) -> dict[int, tuple[int, ...]]:
    scores = scores_of_model(str(file), structure, "adapt.experts.from")
    return choose(choice(file, **settings), scores, structure, "adapt.experts")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"k": 2}, {0: (1, 3), 1: (0, 4), 2: (0, 1), 3: (0, 1)}),
        ({"rule": "tokens", "p": 0.6}, {0: (1, 3), 1: (0, 4, 5), 2: (0, 1, 2, 3, 4), 3: (0, 1, 2, 3, 4)}),
        ({"rule": "gate", "p": 0.4, "layers": [0]}, {0: (0,)}),
        ({"rule": "gate", "p": 0.5, "layers": [0]}, {0: (0, 2)}),
        ({"rule": "reap", "k": 2, "layers": "0"}, {0: (7, 6)}),
        ({"rule": "least", "k": 2, "layers": "1"}, {1: (1, 2)}),
        ({"budget": 0.25, "layers": "0-1"}, {0: (1, 3), 1: (0, 4)}),
        ({"budget": 0.01, "layers": "0"}, {0: (1,)}),
        ({"experts": 7, "layers": "0-1"}, {0: (1, 3, 4), 1: (0, 4, 5)}),
        ({"p": 1.0, "layers": "1"}, {1: (0, 4, 5, 6, 7)}),
        ({"k": 1, "layers": "none"}, {}),
    ],
)
def test_a_rule_by_hand(settings: Any, expected: Any, file: Path, mixtral: ModelStructure) -> None:
    assert chosen(file, mixtral, **settings) == expected


def test_foreground_is_what_general_text_uses_less(file: Path, tmp_path: Path, mixtral: ModelStructure) -> None:
    general = write_scores(tmp_path / "general.json", TOKENS | {0: [0, 70, 10, 5, 5, 10, 0, 0]})
    found = chosen(file, mixtral, rule="foreground", background=str(general), k=2, layers="0")
    assert found == {0: (3, 0)}  # 0.15 more, then 0.05 more, as 4, 6 and 7 are, which come later
    with pytest.raises(ValueError, match="compares with background"):
        choice(file, rule="foreground", k=1)


def test_random_is_drawn_by_its_seed(file: Path, mixtral: ModelStructure) -> None:
    one, other = (chosen(file, mixtral, rule="random", k=3, seed=seed) for seed in (0, 1))
    assert one == chosen(file, mixtral, rule="random", k=3, seed=0) != other
    assert all(len(set(ids)) == 3 for ids in one.values())
    assert len(set(one.values())) > 1


def test_parameters_count_what_trains(file: Path, mixtral: ModelStructure) -> None:
    each = mixtral.moe_layers[0].shape.parameters_per_expert
    assert all(len(ids) == 3 for ids in chosen(file, mixtral, parameters=LAYERS * each * 3 + 1).values())
    assert all(len(ids) == 2 for ids in chosen(file, mixtral, parameters=LAYERS * each * 3 - 1).values())
    with pytest.raises(UserError, match="are fewer than the"):
        chosen(file, mixtral, parameters=LAYERS * each - 1)


@pytest.mark.parametrize("gate_up", ["fused", "split"])
def test_parameters_of_lora_are_those_of_the_model(gate_up: str, small_model: Path) -> None:
    lora = {"rank": 4, "alpha": 8, "targets": ["experts"], "ids": [1], "gate_up": gate_up}
    adapted = build(RunConfig.model_validate({"model": {"path": str(small_model)}, "adapt": {"lora": lora}}), "meta")
    held = sum(p.numel() for p in adapted.trainable().values())
    layers = adapted.structure.moe_layers
    assert held == sum(layer.shape.trained_parameters(LoraConfig.model_validate(lora), 4) for layer in layers)


def test_coverage_is_beside_that_of_a_random_choice(file: Path, mixtral: ModelStructure) -> None:
    covers = coverage(chosen(file, mixtral, k=2, layers="0-2"), read_scores(file, "it"))
    assert covers.layers == pytest.approx({0: 0.6, 1: 0.55, 2: 0.25})
    assert covers.random == {0: 0.25, 1: 0.25, 2: 0.25}
    assert covers.total == pytest.approx((60 + 55 + 20) / 280)
    assert covers.random_total == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 9}, "k: 9 is more than the 8 experts of a layer"),
        ({"experts": 3}, "experts: 3 are fewer than one in each of 4 layers"),
        ({"k": 1, "layers": "7"}, "layer 7 has no experts; choose from 0, 1, 2, 3"),
        ({"budget": "44GiB"}, "44GiB is memory"),
    ],
)
def test_what_cannot_be_chosen_is_said(settings: Any, message: str, file: Path, mixtral: ModelStructure) -> None:
    with pytest.raises(UserError, match=message):
        chosen(file, mixtral, **settings)


def test_scores_of_another_model_are_refused(tmp_path: Path, mixtral: ModelStructure) -> None:
    other = write_scores(tmp_path / "other.json", {0: [1, 2, 3]}, model="another")
    with pytest.raises(UserError, match=r"of another model \(another\): layer 0 has 3 experts there and 8 here"):
        chosen(other, mixtral, k=1)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2, "layers": {}}', '{"schema": 1, "layers": {"0": 3}}'])
def test_a_file_that_holds_no_scores_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text(text)
    with pytest.raises(
        UserError, match=r"adapt.experts.from: .*scores.json' cannot be read: .*; give what moetune score writes"
    ):
        read_scores(tmp_path / "scores.json", "adapt.experts.from")


def test_a_run_file_may_name_scores(small_model: Path, tmp_path: Path) -> None:
    tokens = {layer: [1, 4, 3, 2] for layer in range(small.LAYERS)}
    scores = write_scores(tmp_path / "scores.json", tokens)
    adapt = {
        "experts": {"from": str(scores), "k": 1},
        "lora": {"rank": 4, "alpha": 8, "targets": ["experts"], "ids": {"from": str(scores), "p": 0.7}},
    }
    config = RunConfig.model_validate({"model": {"path": str(small_model)}, "adapt": adapt})
    assert RunConfig.model_validate(yaml.safe_load(config.to_yaml())) == config
    run = resolve(config, "cuda")
    assert run.selection.experts == {0: (1,), 1: (1,)}
    assert run.selection.lora_experts == {0: (2,), 1: (2,)}  # of 1 and 2, 1 trains whole
    assert RunConfig.model_validate(yaml.safe_load(run.config.to_yaml())).to_yaml() == run.config.to_yaml()
    scores.unlink()  # what the run folder keeps needs it no more
    assert resolve(run.config, "cuda").selection == run.selection
    missing = examine(config).problems
    assert ["adapt.experts.from" in missing[0], "adapt.lora.ids.from" in missing[1]] == [True, True]


def test_ids_by_layer(mixtral: ModelStructure) -> None:
    adapt = AdaptConfig.model_validate({"experts": {"ids": {2: "0-1", 0: [3]}}})
    assert resolve_ids(adapt, mixtral) == {0: (3,), 2: (0, 1)}
    with pytest.raises(ValueError, match="names the layers already"):
        AdaptConfig.model_validate({"experts": {"layers": 1, "ids": {2: [1]}}})
    with pytest.raises(ValueError, match="layer 0 is written twice"):
        AdaptConfig.model_validate({"experts": {"ids": {0: [1], "0": [2, 3]}}})
    with pytest.raises(UserError, match="layer 9 has no experts"):
        resolve_ids(AdaptConfig.model_validate({"experts": {"ids": {9: [1]}}}), mixtral)
    with pytest.raises(UserError, match="expert 8 does not exist; layer 2 has experts 0-7"):
        resolve_ids(AdaptConfig.model_validate({"experts": {"ids": {2: [8]}}}), mixtral)


def resolve_ids(adapt: AdaptConfig, structure: ModelStructure) -> Any:
    selection, problems = select(resolve_choices(adapt, structure)[0], structure)
    raise_problems(problems)
    return selection.experts
