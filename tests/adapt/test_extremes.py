"""Logits at extreme values of a configuration are those of the plain model, for every mixture of experts.

Values of a field are set in the toy of each type that has it. Every expert trains, and the first layer's weights are
large, so that limits are reached; biases are drawn, so that they count. Tolerance: relative, of the norm of all logits.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from moetune.adapt.build import Adapted
from tests.reference import build_toy, plain_model, plain_weights, token_ids
from tests.toys import EXPERTS, expert_model_types, toy_config, toy_model

TOLERANCE = 2e-5
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
SCALES = ("routed_scaling_factor", "route_scale", "router_scaling_factor", "moe_routed_scaling_factor")
EXTREMES: dict[str, dict[str, Any]] = {
    "a limit of 12": {"swiglu_limit": 12.0},
    "every expert": dict.fromkeys(TOP_K, EXPERTS),
    "groups": {"n_group": 4, "num_expert_group": 4, "topk_group": 2},
    "sums unlike one": {"norm_topk_prob": False} | dict.fromkeys(SCALES, 7.0),
    "relu": {"hidden_act": "relu", "hidden_activation": "relu"},
    "biases": dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "lm_head_bias"), True),
    "tied": {"tie_word_embeddings": True},
    "windows of 4": {"sliding_window": 4, "sliding_window_size": 4, "use_sliding_window": True, "max_window_layers": 0},
}
ON_A_PUSH = {("a limit of 12", "deepseek_v4"), ("every expert", "mixtral"), ("windows of 4", "gpt_oss")}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Types that have a field of an extreme; toys of all of them take seconds, so that only `--all` looks for them."""
    cases = sorted(ON_A_PUSH)
    if metafunc.config.getoption("--all"):
        fields = {name: toy_config(name).to_dict().keys() for name in expert_model_types()}
        cases = [(extreme, name) for extreme, values in EXTREMES.items() for name in fields if fields[name] & values]
        cases.remove(("every expert", "phimoe"))  # refused: transformers computes two experts
    metafunc.parametrize(("extreme", "model_type"), cases)


@torch.no_grad()
def enlarge_(adapted: Adapted) -> None:
    """Draw biases, and scale the experts' first products up."""
    generator = torch.Generator().manual_seed(2)
    for name, tensor in (*adapted.model.named_parameters(), *adapted.model.named_buffers()):
        if name.endswith("bias") and tensor.is_floating_point():
            tensor.normal_(std=0.1, generator=generator)
    for name, tensor in adapted.trainable().items():
        if ".trained." in name and name.endswith("gate_up.weight"):
            tensor.mul_(1000)


@pytest.mark.slow
def test_logits_are_those_of_the_plain_model(extreme: str, model_type: str, tmp_path: Path) -> None:
    there = toy_config(model_type).to_dict()
    values = {name: value for name, value in EXTREMES[extreme].items() if name in there}
    ids = token_ids()
    try:
        toy_model(model_type, **values)(input_ids=ids, use_cache=False)
    except Exception as error:
        pytest.skip(f"transformers' own model does not run: {error}")
    adapted = build_toy(toy_config(model_type, **values), tmp_path, {"experts": {"ids": list(range(EXPERTS))}})
    enlarge_(adapted)
    plain = plain_model(adapted.model.config)
    weights = plain_weights(adapted, plain, adapted.trainable())
    with torch.no_grad():
        found = adapted.model(input_ids=ids, use_cache=False).logits
        expected = torch.func.functional_call(plain, weights, kwargs={"input_ids": ids, "use_cache": False}).logits
    assert (found - expected).norm() <= TOLERANCE * expected.norm()
    assert expected.isfinite().all()
