"""The `adapt:` block against a model: what is selected, and the message for what does not exist."""

from typing import Any

import pytest

from moetune.config.schema import AdaptConfig
from moetune.models.selection import Selection, ranges, select
from moetune.models.structure import ModelStructure, meta_model, read_structure
from tests.toys import EXPERTS, toy_config

ALL = tuple(range(EXPERTS))
LORA = {"rank": 2, "alpha": 4}
STRUCTURES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "deepseek_v3": {},  # layer 0 is dense; layers 1 to 3 have experts and shared experts
    "llama": {},
    "tied": {"model_type": "mixtral", "tie_word_embeddings": True},
    "hrm_text": {"num_hidden_layers": 3},  # two stacks, of which one holds the decoder layers
}


@pytest.fixture(scope="module")
def models() -> dict[str, ModelStructure]:
    return {
        name: read_structure(meta_model(toy_config(**({"model_type": name} | settings))))
        for name, settings in STRUCTURES.items()
    }


@pytest.fixture(scope="module")
def mixtral(models: dict[str, ModelStructure]) -> ModelStructure:
    return models["mixtral"]


@pytest.fixture(scope="module")
def deepseek(models: dict[str, ModelStructure]) -> ModelStructure:
    return models["deepseek_v3"]


def chosen(structure: ModelStructure, **adapt: Any) -> Selection:
    selection, problems = select(AdaptConfig.model_validate(adapt), structure)
    assert problems == []
    return selection


def problems(structure: ModelStructure, **adapt: Any) -> list[str]:
    return select(AdaptConfig.model_validate(adapt), structure)[1]


def linears(structure: ModelStructure, *targets: str, **lora: Any) -> set[str]:
    found = chosen(structure, lora={**LORA, "targets": targets, **lora}).lora_linears
    assert len(found) == len(set(found))
    return set(found)


def test_routers(mixtral: ModelStructure, deepseek: ModelStructure) -> None:
    selection = chosen(mixtral, router="0-1,3")
    assert selection.full == {f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 1, 3)}
    assert (selection.experts, selection.lora_experts, selection.lora_linears) == ({}, {}, ())
    weights = {name for name in chosen(deepseek, router="all").full if "gate.weight" in name}
    assert weights == {f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2, 3)}


def test_experts(mixtral: ModelStructure, deepseek: ModelStructure) -> None:
    selection = chosen(mixtral, experts={"layers": "1-2", "ids": [0, "3-5"]})
    assert selection.experts == {1: (0, 3, 4, 5), 2: (0, 3, 4, 5)}
    assert selection.full == frozenset()
    assert chosen(deepseek, experts={}).experts == {1: ALL, 2: ALL, 3: ALL}
    assert chosen(mixtral, router=0, experts={"layers": "none"}).experts == {}
    assert chosen(mixtral, router=0, experts={"ids": "none"}).experts == {}
    both = chosen(mixtral, experts={"layers": [1, 2], "ids": [0]}, also=["*layers.2.mlp.experts*"])
    assert both.experts == {1: (0,), 2: ALL}


def test_components_patterns_and_everything(mixtral: ModelStructure, models: dict[str, ModelStructure]) -> None:
    names = {one.name for one in mixtral.parameters}
    norms = {one.name for one in mixtral.parameters_of("norm")}
    assert chosen(mixtral, also=["norm"]).full == norms
    assert chosen(mixtral, also=["model.layers.2.*norm*"]).full == {n for n in norms if "layers.2." in n}
    everything = chosen(mixtral, also=["*"])
    assert everything.full == names - {one.name for one in mixtral.parameters_of("experts")}
    assert everything.experts == dict.fromkeys(range(4), ALL)
    assert chosen(mixtral, also=["experts"]).experts == everything.experts
    assert chosen(mixtral, also=["*layers.2.mlp.experts*"]).experts == {2: ALL}
    assert chosen(models["llama"], also=["*"]).full == {one.name for one in models["llama"].parameters}
    assert chosen(models["tied"], also=["embedding"]).full == {"model.embed_tokens.weight"}


def test_lora_is_on_attention_and_the_experts_that_do_not_train_whole(
    mixtral: ModelStructure, deepseek: ModelStructure
) -> None:
    selection = chosen(mixtral, experts={"layers": [1], "ids": [0, 1]}, lora={**LORA, "layers": "0-1", "ids": "1-2"})
    assert selection.lora_experts == {0: (1, 2), 1: (2,)}
    assert set(selection.lora_linears) == {
        f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qkvo"
    }
    selection = chosen(deepseek, lora={**LORA, "layers": "0-1"})
    assert selection.lora_experts == {1: ALL}
    assert {path.split(".")[2] for path in selection.lora_linears} == {"0", "1"}


def test_lora_on_routers(mixtral: ModelStructure) -> None:
    assert linears(mixtral, "router", layers=[1]) == {"model.layers.1.mlp.gate"}
    assert linears(mixtral, "gate") == {f"model.layers.{layer}.mlp.gate" for layer in range(4)}


def test_lora_targets_are_components_modules_or_patterns(mixtral: ModelStructure, deepseek: ModelStructure) -> None:
    mlp = [f"{name}_proj" for name in ("gate", "up", "down")]
    shared = linears(deepseek, "shared_experts", layers=[2])
    assert shared == {f"model.layers.2.mlp.shared_experts.{name}" for name in mlp}
    assert linears(deepseek, "o_proj") == {f"model.layers.{layer}.self_attn.o_proj" for layer in range(4)}
    assert linears(deepseek, "*.0.mlp.*", "lm_head") == {"lm_head", *(f"model.layers.0.mlp.{name}" for name in mlp)}
    assert len(linears(mixtral, "attention", "q_proj")) == 4 * 4
    assert "lm_head" in linears(mixtral, "*")
    assert "lm_head" not in linears(mixtral, "*", layers="0")


def test_layers_beside_the_decoder_stack_are_none_of_the_chosen_layers(models: dict[str, ModelStructure]) -> None:
    chosen_layers = linears(models["hrm_text"], "attention", "lm_head", layers="1")
    assert {path.split(".self_attn.")[0] for path in chosen_layers} == {"model.L_module.layers.1", "lm_head"}


NOTHING = "adapt: nothing trains; set router, experts, lora or also"
NO_FROZEN = "adapt.lora.targets[0]: no frozen expert in the chosen layers to put LoRA on"
DENSE = "'llama' is a dense model; it has no routers and no experts"
MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"router": "2-5"}, "adapt.router: layer 4-5 has no router; choose from 0-3"),
    ("mixtral", {"experts": {"layers": [9]}}, "adapt.experts.layers: layer 9 has no experts; choose from 0-3"),
    ("mixtral", {"lora": {**LORA, "layers": "0-4"}}, "adapt.lora.layers: layer 4 does not exist; choose from 0-3"),
    ("deepseek_v3", {"router": "0-1"}, "adapt.router: layer 0 has no router; choose from 1-3"),
    (
        "mixtral",
        {"experts": {"layers": "1-2", "ids": "6-9"}},
        "adapt.experts.ids: expert 8-9 does not exist; layer 1 has experts 0-7",
    ),
    ("mixtral", {"lora": {**LORA, "ids": [8]}}, "adapt.lora.ids: expert 8 does not exist; layer 0 has experts 0-7"),
    ("mixtral", {"also": ["norms"]}, "adapt.also[0]: 'norms' matches no parameter. Did you mean 'norm'?"),
    (
        "mixtral",
        {"lora": {**LORA, "targets": ["atention"]}},
        "adapt.lora.targets[0]: 'atention' matches no linear layer there. Did you mean 'attention'?",
    ),
    (
        "mixtral",
        {"lora": {**LORA, "targets": ["embedding"]}},
        "adapt.lora.targets[0]: 'embedding' matches no linear layer there. Components: attention, router, experts, "
        "lm_head; patterns match names such as 'lm_head.weight'",
    ),
    (
        "mixtral",
        {"lora": {**LORA, "targets": ["experts", "q_prj"]}},
        "adapt.lora.targets[1]: 'q_prj' matches no linear layer there. Did you mean 'q_proj'?",
    ),
    (
        "mixtral",
        {"also": ["*layers.1.mlp.experts.down_proj"]},
        "adapt.also[0]: '*layers.1.mlp.experts.down_proj' matches only part of the experts of layer 1 "
        "(model.layers.1.mlp.experts.down_proj); experts train whole: write also: [experts], or use adapt.experts",
    ),
    (
        "mixtral",
        {"also": ["attention"], "lora": {**LORA, "targets": ["q_proj"], "layers": [1]}},
        "adapt: model.layers.1.self_attn.q_proj would train in full and with LoRA; choose one for each",
    ),
    (
        "mixtral",
        {"router": "1", "lora": {**LORA, "targets": ["router"]}},
        "adapt: model.layers.1.mlp.gate would train in full and with LoRA; choose one for each",
    ),
    (
        "mixtral",
        {"also": ["attention"], "lora": LORA},
        "adapt: model.layers.0.self_attn.k_proj, model.layers.0.self_attn.o_proj, model.layers.0.self_attn.q_proj, "
        "and 13 more would train in full and with LoRA; choose one for each",
    ),
    ("mixtral", {"experts": {}, "lora": {**LORA, "targets": ["experts"]}}, NO_FROZEN),
    ("deepseek_v3", {"lora": {**LORA, "targets": ["experts"], "layers": [0]}}, NO_FROZEN),
    (
        "deepseek_v3",
        {"lora": {**LORA, "targets": ["up_proj"]}},
        "adapt.lora.targets[0]: 'up_proj' matches model.layers.0.mlp.up_proj, and none of the experts that tokens are "
        "routed to; name components: experts, or dense_mlp, shared_experts if only these are meant",
    ),
    ("llama", {"router": "all"}, f"adapt.router: {DENSE}"),
    ("llama", {"experts": {"ids": [0]}}, f"adapt.experts.layers: {DENSE}"),
    ("llama", {"lora": LORA}, NO_FROZEN.replace("[0]", "[1]")),
    ("mixtral", {}, NOTHING),
    ("mixtral", {"router": "none", "experts": {"ids": "none"}}, NOTHING),
    (
        "mixtral",
        {"lora": {**LORA, "targets": ["attention"], "ids": [1]}},
        "adapt.lora.ids: chooses experts, and adapt.lora.targets has no experts",
    ),
]


@pytest.mark.parametrize(("model", "adapt", "message"), MISTAKES)
def test_a_mistake_is_named_with_what_exists(
    model: str, adapt: dict[str, Any], message: str, models: dict[str, ModelStructure]
) -> None:
    assert problems(models[model], **adapt) == [message]


def test_what_matches_nothing_lists_components_and_names(mixtral: ModelStructure) -> None:
    (problem,) = problems(mixtral, also=["*zzz*"])
    assert problem.startswith("adapt.also[0]: '*zzz*' matches no parameter. Components: embedding, attention,")
    assert "patterns match names such as 'lm_head.weight'" in problem
    (problem,) = problems(mixtral, also=["shared_experts"])
    assert problem.startswith("adapt.also[0]: 'shared_experts' matches no parameter.")


def test_every_problem_is_reported_at_once(mixtral: ModelStructure) -> None:
    found = problems(
        mixtral,
        router=[7],
        experts={"layers": [0], "ids": [8]},
        also=["nrom", "*experts.gate_up_proj"],
        lora={**LORA, "targets": ["attentoin", "experts"], "layers": [4]},
    )
    wheres = [line.partition(":")[0] for line in found]
    layers = 4 * ["adapt.also[1]"]
    lora = ["adapt.lora.layers", "adapt.lora.targets[0]"]
    assert wheres == ["adapt.router", "adapt.experts.ids", "adapt.also[0]", *layers, *lora]


def test_runs_of_numbers_are_written_as_ranges() -> None:
    assert ranges([5, 0, 1, 2, 7, 8]) == "0-2,5,7-8"


@pytest.mark.parametrize(
    ("model", "target", "components"),
    [
        ("mixtral", "all-linear", "attention, experts"),
        ("mixtral", "gate_proj", "experts"),
        ("mixtral", "self_attn", "attention"),
        ("mixtral", "model.layers.*.mlp.w1", "experts"),
        ("deepseek_v3", "all-linear", "attention, experts, dense_mlp"),
        ("deepseek_v3", "q_proj", "attention"),
        ("llama", "all-linear", "attention, dense_mlp"),
    ],
)
def test_linear_layers_under_the_names_of_other_tools(
    model: str, target: str, components: str, models: dict[str, ModelStructure]
) -> None:
    (problem,) = problems(models[model], lora={**LORA, "targets": [target]})
    assert problem.startswith(f"adapt.lora.targets[0]: {target!r} matches no linear layer")
    assert f"write [{components}]." in problem


@pytest.mark.parametrize("target", ["lm_head", "lm_head.weight", "*head*"])
def test_a_tied_head_is_named_with_its_embedding(target: str, models: dict[str, ModelStructure]) -> None:
    (problem,) = problems(models["tied"], also=[target])
    assert problem.startswith(f"adapt.also[0]: {target!r} is one weight with model.embed_tokens.weight")
    assert "write embedding" in problem


@pytest.mark.parametrize("target", ["lm_head", "*"])
def test_lora_on_a_tied_head_is_refused(target: str, models: dict[str, ModelStructure]) -> None:
    (problem,) = problems(models["tied"], lora={**LORA, "targets": ["attention", target]})
    assert problem.startswith(f"adapt.lora.targets[1]: {target!r} takes in lm_head")
    assert "model.embed_tokens.weight (tied)" in problem
    assert "adapt.also: [embedding]" in problem
    assert linears(models["tied"], "attention")


def test_ranks_by_target_and_layer(deepseek: ModelStructure) -> None:
    targets = ["attention", "experts", "dense_mlp"]
    rank = {"attention": {"0-1": 4, "2-3": 2}, "experts": 8, "dense_mlp": {0: 16}}
    ranks = chosen(deepseek, lora={**LORA, "targets": targets, "rank": rank}).ranks
    of_layers = {path: rank for path, rank in ranks.items() if path.endswith("o_proj")}
    assert list(of_layers.values()) == [4, 4, 2, 2]
    assert {rank for path, rank in ranks.items() if path.endswith("experts")} == {8}
    assert {path.split(".")[2] for path, rank in ranks.items() if rank == 16} == {"0"}


@pytest.mark.parametrize(
    ("rank", "targets", "said"),
    [
        ({"0-2": 4}, ["attention"], "'attention' in layer 3"),
        ({"attention": {"0-4": 4}}, ["attention"], "layer 4 does not exist"),
        ({"0-3": 4}, ["lm_head"], "lm_head, which is in no layer"),
        ({"attention": 4, "q_proj": 2}, ["attention", "q_proj"], "with rank 4 and with 2"),
    ],
)
def test_ranks_that_are_missing_or_two(rank: Any, targets: list[str], said: str, mixtral: ModelStructure) -> None:
    (message, *_) = problems(mixtral, lora={**LORA, "rank": rank, "targets": targets})
    assert message.startswith("adapt.lora.rank: ")
    assert said in message
