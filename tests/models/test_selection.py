"""The `adapt:` block against a model: what is chosen, and what is said about what does not exist."""

from __future__ import annotations

from typing import Any

import pytest

from moetune.config.schema import AdaptConfig
from moetune.errors import UserError
from moetune.models.selection import Selection, _numbers, select
from moetune.models.structure import ModelStructure, meta_model, read_structure
from moetune.run.resolve import raise_problems
from tests.toys import EXPERTS, toy_config

ALL = tuple(range(EXPERTS))


@pytest.fixture(scope="module")
def mixtral() -> ModelStructure:
    return read_structure(meta_model(toy_config("mixtral")))


@pytest.fixture(scope="module")
def deepseek() -> ModelStructure:
    """Layer 0 is dense; layers 1 to 3 have experts and shared experts."""
    return read_structure(meta_model(toy_config("deepseek_v3")))


@pytest.fixture(scope="module")
def dense() -> ModelStructure:
    return read_structure(meta_model(toy_config("llama")))


def chosen(structure: ModelStructure, **adapt: Any) -> Selection:
    selection, problems = select(AdaptConfig.model_validate(adapt), structure)
    raise_problems(problems)
    return selection


def problems(structure: ModelStructure, **adapt: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        chosen(structure, **adapt)
    return str(caught.value).splitlines()


LORA = {"rank": 2, "alpha": 4}


def test_routers_of_a_range_of_layers(mixtral: ModelStructure) -> None:
    selection = chosen(mixtral, router="0-1,3")
    assert selection.full == {f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 1, 3)}
    assert (selection.experts, selection.lora_experts, selection.lora_linears) == ({}, {}, ())


def test_all_routers_include_what_belongs_to_them(deepseek: ModelStructure) -> None:
    selection = chosen(deepseek, router="all")
    assert {name for name in selection.full if "gate.weight" in name} == {
        f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2, 3)
    }


def test_experts_of_a_range_of_layers(mixtral: ModelStructure) -> None:
    selection = chosen(mixtral, experts={"layers": "1-2", "ids": [0, "3-5"]})
    assert selection.experts == {1: (0, 3, 4, 5), 2: (0, 3, 4, 5)}
    assert selection.full == frozenset()


def test_all_means_the_layers_that_have_experts(deepseek: ModelStructure) -> None:
    assert chosen(deepseek, experts={}).experts == {1: ALL, 2: ALL, 3: ALL}


def test_no_expert_in_no_layer(mixtral: ModelStructure) -> None:
    assert chosen(mixtral, router=0, experts={"layers": "none"}).experts == {}
    assert chosen(mixtral, router=0, experts={"ids": "none"}).experts == {}


def test_components_patterns_and_everything(mixtral: ModelStructure) -> None:
    names = {part.name for part in mixtral.parameters}
    norms = {part.name for part in mixtral.parameters_of("norm")}
    experts = {part.name for part in mixtral.parameters_of("experts")}
    assert chosen(mixtral, also=["norm"]).full == norms
    assert chosen(mixtral, also=["model.layers.2.*norm*"]).full == {n for n in norms if "layers.2." in n}
    everything = chosen(mixtral, also=["*"])
    assert everything.full == names - experts
    assert everything.experts == dict.fromkeys(range(4), ALL)
    assert chosen(mixtral, also=["experts"]).experts == everything.experts
    assert chosen(mixtral, also=["*layers.2.mlp.experts*"]).experts == {2: ALL}


def test_whole_layers_from_a_pattern_come_on_top_of_chosen_experts(mixtral: ModelStructure) -> None:
    selection = chosen(mixtral, experts={"layers": [1, 2], "ids": [0]}, also=["*layers.2.mlp.experts*"])
    assert selection.experts == {1: (0,), 2: ALL}


def test_a_dense_model_trains_whole(dense: ModelStructure) -> None:
    assert chosen(dense, also=["*"]).full == {part.name for part in dense.parameters}


def test_lora_goes_on_attention_and_the_experts_that_do_not_train_whole(mixtral: ModelStructure) -> None:
    selection = chosen(
        mixtral,
        experts={"layers": [1], "ids": [0, 1]},
        lora={**LORA, "layers": "0-1", "ids": "1-2"},
    )
    assert selection.lora_experts == {0: (1, 2), 1: (2,)}
    assert set(selection.lora_linears) == {
        f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qkvo"
    }


def test_lora_targets_name_a_component_a_module_or_a_pattern(deepseek: ModelStructure) -> None:
    shared = chosen(deepseek, lora={**LORA, "targets": ["shared_experts"], "layers": [2]}).lora_linears
    assert set(shared) == {f"model.layers.2.mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
    named = chosen(deepseek, lora={**LORA, "targets": ["o_proj"]}).lora_linears
    assert set(named) == {f"model.layers.{layer}.self_attn.o_proj" for layer in range(4)}
    pattern = chosen(deepseek, lora={**LORA, "targets": ["*.0.mlp.*", "lm_head"]}).lora_linears
    assert set(pattern) == {
        "lm_head",
        *(f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")),
    }


def test_a_linear_that_two_targets_name_gets_factors_once(mixtral: ModelStructure) -> None:
    linears = chosen(mixtral, lora={**LORA, "targets": ["attention", "q_proj"]}).lora_linears
    assert len(linears) == len(set(linears)) == 4 * 4


def test_lora_in_a_layer_without_experts_is_on_the_rest(deepseek: ModelStructure) -> None:
    selection = chosen(deepseek, lora={**LORA, "layers": "0-1"})
    assert selection.lora_experts == {1: ALL}
    assert {path.split(".")[2] for path in selection.lora_linears} == {"0", "1"}


def test_a_layer_that_does_not_exist(mixtral: ModelStructure) -> None:
    assert problems(mixtral, router="2-5") == ["adapt.router: layer 4-5 has no router; choose from 0-3"]
    assert problems(mixtral, experts={"layers": [9]}) == [
        "adapt.experts.layers: layer 9 has no experts; choose from 0-3"
    ]
    assert problems(mixtral, lora={**LORA, "layers": "0-4"}) == [
        "adapt.lora.layers: layer 4 does not exist; choose from 0-3"
    ]


def test_a_layer_that_has_no_experts(deepseek: ModelStructure) -> None:
    assert problems(deepseek, router="0-1") == ["adapt.router: layer 0 has no router; choose from 1-3"]


def test_an_expert_that_does_not_exist(mixtral: ModelStructure) -> None:
    assert problems(mixtral, experts={"layers": "1-2", "ids": "6-9"}) == [
        "adapt.experts.ids: expert 8-9 does not exist; layer 1 has experts 0-7"
    ]
    assert problems(mixtral, lora={**LORA, "ids": [8]}) == [
        "adapt.lora.ids: expert 8 does not exist; layer 0 has experts 0-7"
    ]


def test_a_misspelt_component_gets_the_nearest_name(mixtral: ModelStructure) -> None:
    assert problems(mixtral, also=["norms"]) == ["adapt.also[0]: 'norms' matches no parameter. Did you mean 'norm'?"]
    assert problems(mixtral, lora={**LORA, "targets": ["atention"]}) == [
        "adapt.lora.targets[0]: 'atention' matches no linear layer there. Did you mean 'attention'?"
    ]
    assert problems(mixtral, lora={**LORA, "targets": ["experts", "q_prj"]}) == [
        "adapt.lora.targets[1]: 'q_prj' matches no linear layer there. Did you mean 'q_proj'?"
    ]


def test_a_pattern_that_matches_nothing_lists_what_exists(mixtral: ModelStructure) -> None:
    (problem,) = problems(mixtral, also=["*zzz*"])
    assert problem.startswith("adapt.also[0]: '*zzz*' matches no parameter. Components: embedding, attention,")
    assert "patterns match names such as 'lm_head.weight'" in problem


def test_a_component_that_the_model_has_not(mixtral: ModelStructure) -> None:
    (problem,) = problems(mixtral, also=["shared_experts"])
    assert problem.startswith("adapt.also[0]: 'shared_experts' matches no parameter.")


def test_part_of_an_expert_cannot_train_alone(mixtral: ModelStructure) -> None:
    assert problems(mixtral, also=["*layers.1.mlp.experts.down_proj"]) == [
        "adapt.also[0]: '*layers.1.mlp.experts.down_proj' matches only part of the experts of layer 1 "
        "(model.layers.1.mlp.experts.down_proj); experts train whole: write also: [experts], or use adapt.experts"
    ]


def test_full_and_lora_on_one_linear_is_a_conflict(mixtral: ModelStructure) -> None:
    assert problems(mixtral, also=["attention"], lora={**LORA, "targets": ["q_proj"], "layers": [1]}) == [
        "adapt: model.layers.1.self_attn.q_proj would train in full and with LoRA; choose one for each"
    ]
    (problem,) = problems(mixtral, also=["attention"], lora=LORA)
    assert problem == (
        "adapt: model.layers.0.self_attn.k_proj, model.layers.0.self_attn.o_proj, "
        "model.layers.0.self_attn.q_proj and 13 more would train in full and with LoRA; choose one for each"
    )


def test_lora_on_experts_that_all_train_whole(mixtral: ModelStructure) -> None:
    assert problems(mixtral, experts={}, lora={**LORA, "targets": ["experts"]}) == [
        "adapt.lora.targets[0]: no frozen expert in the chosen layers to put LoRA on"
    ]


def test_lora_on_experts_where_there_are_none(deepseek: ModelStructure) -> None:
    assert problems(deepseek, lora={**LORA, "targets": ["experts"], "layers": [0]}) == [
        "adapt.lora.targets[0]: no frozen expert in the chosen layers to put LoRA on"
    ]


def test_a_dense_model_has_no_routers_and_no_experts(dense: ModelStructure) -> None:
    sentence = "'llama' is a dense model; it has no routers and no experts"
    assert problems(dense, router="all") == [f"adapt.router: {sentence}"]
    assert problems(dense, experts={"ids": [0]}) == [f"adapt.experts.layers: {sentence}"]
    (problem,) = problems(dense, lora=LORA)
    assert problem.endswith("no frozen expert in the chosen layers to put LoRA on")


def test_nothing_trains(mixtral: ModelStructure) -> None:
    sentence = "adapt: nothing trains; set router, experts, lora or also"
    assert problems(mixtral) == [sentence]
    assert problems(mixtral, router="none", experts={"ids": "none"}) == [sentence]


def test_every_problem_is_reported_at_once(mixtral: ModelStructure) -> None:
    found = problems(
        mixtral,
        router=[7],
        experts={"layers": [0], "ids": [8]},
        also=["nrom", "*experts.gate_up_proj"],
        lora={**LORA, "targets": ["attentoin", "experts"], "layers": [4]},
    )
    wheres = [line.partition(":")[0] for line in found]
    assert [w for w in wheres if not w.startswith("adapt.also[1]")] == [
        "adapt.router",
        "adapt.experts.ids",
        "adapt.also[0]",
        "adapt.lora.layers",
        "adapt.lora.targets[0]",
    ]
    assert wheres.count("adapt.also[1]") == 4  # one a layer


def test_runs_of_numbers_are_written_as_ranges() -> None:
    assert _numbers([5, 0, 1, 2, 7, 8]) == "0-2, 5, 7-8"


def test_lora_in_some_layers_is_in_no_linear_outside_them() -> None:
    structure = read_structure(meta_model(toy_config("mixtral")))
    lora = {"rank": 2, "alpha": 4, "targets": ["*"]}
    assert "lm_head" not in chosen(structure, lora=lora | {"layers": "0"}).lora_linears
    assert "lm_head" in chosen(structure, lora=lora).lora_linears


def test_lora_ids_without_experts_among_the_targets() -> None:
    structure = read_structure(meta_model(toy_config("mixtral")))
    lora = {"rank": 2, "alpha": 4, "targets": ["attention"], "ids": [1]}
    with pytest.raises(UserError, match=r"adapt\.lora\.ids: chooses experts, and adapt\.lora\.targets has no experts"):
        chosen(structure, lora=lora)


@pytest.mark.parametrize(
    ("target", "components"),
    [("all-linear", "attention, experts"), ("gate_proj", "experts"), ("model.layers.*.mlp.w1", "experts")],
)
def test_linear_layers_under_the_names_of_other_tools(mixtral: ModelStructure, target: str, components: str) -> None:
    (problem,) = problems(mixtral, lora={**LORA, "targets": [target]})
    assert problem.startswith(f"adapt.lora.targets[0]: {target!r} matches no linear layer")
    assert f"write [{components}]." in problem


def test_all_linear_of_other_models(deepseek: ModelStructure, dense: ModelStructure) -> None:
    lora = {**LORA, "targets": ["all-linear"]}
    assert "write [attention, experts, dense_mlp]." in problems(deepseek, lora=lora)[0]
    assert "write [attention, dense_mlp]." in problems(dense, lora=lora)[0]
    assert "write [attention]." in problems(deepseek, lora={**LORA, "targets": ["q_proj"]})[0]


@pytest.fixture(scope="module")
def tied() -> ModelStructure:
    return read_structure(meta_model(toy_config("mixtral", tie_word_embeddings=True)))


@pytest.mark.parametrize("target", ["lm_head", "lm_head.weight", "*head*"])
def test_a_tied_head_is_named_with_its_embedding(tied: ModelStructure, target: str) -> None:
    (problem,) = problems(tied, also=[target])
    assert problem.startswith(f"adapt.also[0]: {target!r} is one weight with model.embed_tokens.weight")
    assert "write embedding" in problem
    assert chosen(tied, also=["embedding"]).full == {"model.embed_tokens.weight"}


@pytest.mark.parametrize("target", ["lm_head", "*"])
def test_lora_on_a_tied_head_is_refused_before_it_trains(tied: ModelStructure, target: str) -> None:
    (problem,) = problems(tied, lora={**LORA, "targets": ["attention", target]})
    assert problem.startswith(f"adapt.lora.targets[1]: {target!r} takes in lm_head")
    assert "model.embed_tokens.weight (tied)" in problem
    assert "adapt.also: [embedding]" in problem
    assert chosen(tied, lora=LORA).lora_linears
