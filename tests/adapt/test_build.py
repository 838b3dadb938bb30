"""`build` on checkpoints in the hub's format: right weights, right gradients, and nothing else moves."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from moetune.adapt.build import Adapted
from moetune.adapt.count import count_trainable
from moetune.errors import UserError
from moetune.training.optim.optimizers import make_optimizer
from tests.reference import (
    assert_close,
    excite_,
    frozen_digest,
    loss_and_gradients,
    next_token_loss,
    reference_loss_and_gradients,
    run_config,
    small_linears_are_quantized,
    token_ids,
)
from tests.resolved import build
from tests.thinned import in_pairs
from tests.toys import EXPERTS, LAYERS, toy_model

MODELS = ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"]
BASES = ["nf4", "int8", "fp8", "nvfp4", "mxfp4", "int4-g64-order", "fp32"]
LORA = {"rank": 2, "alpha": 4}
ADAPT: dict[str, dict[str, Any]] = {
    "router-only": {"router": "all"},
    "chosen experts": {"router": "1-2", "experts": {"layers": "1-2", "ids": [0, 5]}},
    "fused LoRA": {"lora": {**LORA, "targets": ["attention", "experts"], "ids": "1-6"}},
    "split LoRA": {"lora": {**LORA, "targets": ["attention", "experts"], "gate_up": "split"}},
    "everything": {"also": ["*"]},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Model type -> folder of its toy as `save_pretrained` writes it."""

    @functools.cache
    def folder(model_type: str) -> Path:
        path = tmp_path_factory.mktemp(model_type)
        model = toy_model(model_type)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" not in name:  # biases start at zero, which would hide a wrong one
                parameter.data.normal_(std=0.05, generator=generator)
        model.save_pretrained(path)
        return path

    return folder


def built(
    folder: Path, adapt: dict[str, Any], *, base: str = "nf4", checkpointing: str = "none", **sections: Any
) -> Adapted:
    config = run_config(
        folder,
        adapt,
        model={"weights": "pretrained", "base": base},
        train={"checkpointing": checkpointing},
        **sections,
    )
    with small_linears_are_quantized():
        adapted = build(config, "cpu")
    excite_(adapted.model)
    return adapted


@pytest.mark.one_in(30)
@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "base", "adapt"), in_pairs(MODELS, BASES, ADAPT))
def test_gradients_equal_autograd_through_the_plain_model(
    model_type: str, base: str, adapt: str, checkpoints: Any
) -> None:
    adapted = built(checkpoints(model_type), ADAPT[adapt], base=base, checkpointing="full")
    expected_loss, expected = reference_loss_and_gradients(adapted, token_ids())
    assert adapted.model.is_gradient_checkpointing
    for training in (True, False):  # checkpointing acts on a model that trains
        adapted.model.train(training)
        loss, gradients = loss_and_gradients(adapted, token_ids())
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
        assert_close(gradients, expected)
        assert gradients.keys() == adapted.trainable().keys()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("adapt", ADAPT.values(), ids=ADAPT)
@pytest.mark.parametrize("model_type", MODELS)
def test_an_unquantized_build_is_the_checkpoint(model_type: str, adapt: dict[str, Any], checkpoints: Any) -> None:
    folder = checkpoints(model_type)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    config = run_config(folder, adapt, model={"weights": "pretrained", "base": "fp32"})
    model = build(config, "cpu").model.eval()  # factors still without effect
    with torch.no_grad():
        torch.testing.assert_close(model(token_ids()).logits, plain(token_ids()).logits, rtol=1e-5, atol=1e-6)


def step(adapted: Adapted, optimizer: Any, seed: int) -> None:
    adapted.model.train()
    optimizer.zero_grad()
    ids = token_ids(seed=seed)
    next_token_loss(adapted.model(input_ids=ids, use_cache=False).logits, ids).backward()
    optimizer.step()


def test_the_digest_sees_one_changed_bit(checkpoints: Any) -> None:
    adapted = built(checkpoints("mixtral"), ADAPT["router-only"])
    before = frozen_digest(adapted)
    bank = adapted.model.get_submodule(adapted.structure.moe_layers[2].experts)
    for tensor in (bank.down.data, adapted.model.model.layers[0].self_attn.q_proj.weight.quant_state.absmax):
        tensor.view(-1)[3] += 1
        assert frozen_digest(adapted) != before
        tensor.view(-1)[3] -= 1
        assert frozen_digest(adapted) == before


def some(count: int) -> st.SearchStrategy[Any]:
    """All, none, or some of `count` numbers."""
    numbers = st.lists(st.integers(0, count - 1), min_size=1, unique=True)
    return st.one_of(st.sampled_from(["all", "none"]), numbers)


@st.composite
def selections(draw: st.DrawFn) -> dict[str, Any]:
    adapt: dict[str, Any] = {"router": draw(some(LAYERS))}
    if draw(st.booleans()):
        adapt["experts"] = {"layers": draw(some(LAYERS)), "ids": draw(some(EXPERTS))}
    if draw(st.booleans()):
        targets = draw(st.lists(st.sampled_from(["q_proj", "v_proj", "o_proj", "experts"]), min_size=1, unique=True))
        adapt["lora"] = {
            "rank": draw(st.integers(1, 3)),
            "alpha": 4,
            "targets": targets,
            "layers": draw(some(LAYERS).filter(lambda layers: layers != "none")),
            "ids": draw(some(EXPERTS)) if "experts" in targets else "all",
            "gate_up": draw(st.sampled_from(["fused", "split"])),
        }
    also = st.sampled_from(["norm", "lm_head", "embedding", "*.k_proj.weight", "model.layers.0.*norm*"])
    adapt["also"] = draw(st.lists(also, max_size=2, unique=True))
    return adapt


def listed(ids: Any, count: int) -> list[int]:
    return list(range(count)) if ids == "all" else [] if ids == "none" else sorted(ids)


def expected_names(adapt: dict[str, Any]) -> set[str]:
    """Names of all that a drawn selection should train in the Mixtral toy, spelled out from the run file alone."""
    norms = {f"model.layers.{n}.{k}_layernorm.weight" for n in range(LAYERS) for k in ("input", "post_attention")}
    also = {
        "norm": norms | {"model.norm.weight"},
        "lm_head": {"lm_head.weight"},
        "embedding": {"model.embed_tokens.weight"},
        "*.k_proj.weight": {f"model.layers.{layer}.self_attn.k_proj.weight" for layer in range(LAYERS)},
        "model.layers.0.*norm*": {name for name in norms if ".0." in name},
    }
    names = {f"model.layers.{layer}.mlp.gate.weight" for layer in listed(adapt["router"], LAYERS)}
    names = names.union(*(also[target] for target in adapt["also"]))
    whole = {
        (layer, expert)
        for layer in listed(adapt.get("experts", {}).get("layers", "none"), LAYERS)
        for expert in listed(adapt["experts"]["ids"], EXPERTS)
    }
    for layer, expert in whole:
        names |= {f"model.layers.{layer}.mlp.experts.trained.{expert}.{p}.weight" for p in ("gate_up", "down")}
    lora = adapt.get("lora")
    for layer in listed(lora["layers"], LAYERS) if lora else []:
        for target in lora["targets"]:
            if target != "experts":
                path = f"model.layers.{layer}.self_attn.{target}"
                names |= {f"{path}.lora_{factor}.default.weight" for factor in "AB"}
            elif {(layer, expert) for expert in listed(lora["ids"], EXPERTS)} - whole:
                path = f"model.layers.{layer}.mlp.experts.lora"
                names |= {f"{path}.{part}_{factor}" for part in ("gate_up", "down") for factor in "AB"}
    return names


@pytest.mark.slow
@given(adapt=selections(), optimizer_name=st.sampled_from(["adamw", "adamw8bit", "sgd"]))
def test_what_is_not_selected_has_neither_gradient_nor_optimizer_state(
    adapt: dict[str, Any], optimizer_name: Any, checkpoints: Any
) -> None:
    names = expected_names(adapt)
    asked = "experts" in adapt.get("lora", {}).get("targets", ())
    if not names or (asked and not any(".lora.gate_up" in name for name in names)):
        with pytest.raises(UserError, match=r"nothing trains|no frozen expert"):
            built(checkpoints("mixtral"), adapt)
        return
    momentum = {"momentum": 0.9} if optimizer_name == "sgd" else {}  # without it SGD keeps no state
    settings = {"name": optimizer_name, "lr": 1e-2, "weight_decay": 0.5, **momentum}
    adapted = built(checkpoints("mixtral"), adapt, checkpointing="full", optimizer=settings)
    assert adapted.trainable().keys() == names
    before = frozen_digest(adapted)
    optimizer = make_optimizer(adapted)
    step(adapted, optimizer, seed=7)

    for name, parameter in adapted.model.named_parameters():
        assert (parameter.grad is not None) == (name in names), name
    trained = {id(parameter) for parameter in adapted.trainable().values()}
    assert {id(parameter) for group in optimizer.param_groups for parameter in group["params"]} == trained
    assert {id(parameter) for parameter in optimizer.state} == trained
    assert frozen_digest(adapted) == before


def test_a_base_in_more_bits_than_compute_is_refused(checkpoints: Any) -> None:
    config = run_config(checkpoints("mixtral"), {"router": "all"}, model={"base": "fp32", "dtype": "bf16"})
    with pytest.raises(UserError, match=r"model\.base: fp32 needs model\.dtype: fp32"):
        build(config, "cpu")


# Sizes.


@pytest.mark.one_in(12)
@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("adapt", ADAPT.values(), ids=ADAPT)
def test_a_meta_build_has_the_tensors_of_a_real_one(model_type: str, adapt: dict[str, Any], checkpoints: Any) -> None:
    config = run_config(checkpoints(model_type), adapt, model={"dtype": "fp32"})
    with small_linears_are_quantized():
        real, meta = (build(config, device) for device in ("cpu", "meta"))
    assert all(parameter.is_meta for parameter in meta.model.parameters())

    def trained(adapted: Adapted) -> dict[str, Any]:
        return {name: (tuple(p.shape), p.dtype) for name, p in adapted.trainable().items()}

    assert trained(real) == trained(meta)
    assert count_trainable(build(config, "meta"))["total"] == sum(p.numel() for p in real.trainable().values())


MIXTRAL = {
    "router-only": ({"router": "all"}, {"router": 1_048_576}),
    "6 layers x 2 experts and their routers": (
        {"router": "0-5", "experts": {"layers": "0-5", "ids": [0, 1]}},
        {"router": 196_608, "experts": 2_113_929_216},
    ),
    "LoRA on one expert, gate and up apart": (
        {"lora": {"rank": 16, "alpha": 32, "targets": ["experts"], "layers": [3], "ids": [5], "gate_up": "split"}},
        {"lora": 884_736},
    ),
    "LoRA on all experts, gate and up apart": (
        {"lora": {"rank": 16, "alpha": 32, "targets": ["experts"], "gate_up": "split"}},
        {"lora": 226_492_416},
    ),
    "LoRA on one expert, gate and up together": (
        {"lora": {"rank": 16, "alpha": 32, "targets": ["experts"], "layers": [3], "ids": [5]}},
        {"lora": 819_200},
    ),
    "LoRA on attention and all experts, gate and up together": (
        {"lora": {"rank": 16, "alpha": 32, "targets": ["attention", "experts"]}},
        {"lora": 223_346_688},
    ),
    "everything": ({"also": ["*"]}, {"router": 1_048_576, "experts": 45_097_156_608, "other": 1_604_587_520}),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("adapt", "parts"), MIXTRAL.values(), ids=MIXTRAL)
def test_trained_parameters_of_mixtral_8x7b(adapt: dict[str, Any], parts: dict[str, int]) -> None:
    counts = count_trainable(build(run_config("mixtral-8x7b", adapt), "meta"))
    none = {"router": 0, "experts": 0, "lora": 0, "other": 0}
    assert counts == {"total": sum(parts.values()), **none, **parts}
