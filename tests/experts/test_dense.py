"""The routers' gradient through all experts, against autograd in float64 on the plain model with naive blocks.

A naive block computes every expert for every token, gives the sparse sum in forward and the dense one's gradient in
backward, and lets experts' gradients pass for the tokens alone that chose them: the definition of DenseMixer, whose
weights of experts that are not chosen have a constant in the place of the normalizer.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from moetune.adapt.build import Adapted
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.memory.measurement.measure import measure as measure_run
from moetune.memory.trace import trace
from moetune.models.catalog import find_model, model_names
from moetune.models.routers import find_logits, score_functions
from moetune.models.structure import meta_model, read_structure
from moetune.parallel.ranks import Ranks
from moetune.run.resolve import resolve
from tests import small
from tests.memory.models import toy_run, write_toy
from tests.parallel import steps, world
from tests.reference import (
    assert_close,
    build_toy,
    loss_and_gradients,
    next_token_loss,
    plain_model,
    plain_weights,
    token_ids,
)
from tests.toys import toy_config

DENSE = {"dense_router_gradient": True}
MIXED = {
    "router": "all",
    "experts": {"ids": [1]},
    "lora": {"rank": 2, "alpha": 4, "targets": ["attention", "experts"], "ids": [0, 2]},
}
NORMALIZED = {"mixtral": 1.0, "gpt_oss": 1.0, "granitemoe": 1.0, "deepseek_v3": 2.5, "glm4_moe": 1.0}
"""Model type -> what the chosen experts' weights sum to; of others they are the scores."""


class NaiveBlock(nn.Module):
    """In the place of a plain model's experts."""

    def __init__(
        self, experts: nn.Module, router: nn.Module, num_experts: int, score: Any, total: float | None
    ) -> None:
        super().__init__()
        self.experts, self.num_experts, self.score, self.total = experts, num_experts, score, total
        router.register_forward_hook(self.saw)

    def saw(self, module: nn.Module, args: Any, output: Any) -> None:
        found = find_logits(output, self.num_experts)
        assert found is not None
        self.logits = found.reshape(-1, self.num_experts)

    def forward(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        chosen_TE = torch.zeros(len(x_TH), self.num_experts, dtype=torch.bool).scatter(1, ids_TK, True)
        scores_TE = self.score(self.logits)
        if self.total is None:
            full_TE = scores_TE
        else:
            norm_T1 = (scores_TE * chosen_TE).sum(-1, keepdim=True) / self.total
            full_TE = torch.where(chosen_TE, scores_TE / norm_T1, scores_TE / norm_T1.detach())
        dense_TH = torch.zeros_like(x_TH)
        for expert in range(self.num_experts):
            everyone = torch.full((len(x_TH), 1), expert)
            out_TH = self.experts(x_TH, everyone, torch.ones(len(x_TH), 1, dtype=x_TH.dtype))
            out_TH = torch.where(chosen_TE[:, expert, None], out_TH, out_TH.detach())
            dense_TH = dense_TH + full_TE[:, expert, None] * out_TH
        sparse_TH = self.experts(x_TH, ids_TK, weights_TK)
        return sparse_TH.detach() + dense_TH - dense_TH.detach()


def reference(adapted: Adapted, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model_type = adapted.model.config.model_type
    plain = plain_model(adapted.model.config).double()
    leaves = {name: p.detach().double().requires_grad_() for name, p in adapted.trainable().items()}
    weights = {name: tensor.double() for name, tensor in plain_weights(adapted, plain, leaves).items()}
    score = torch.sigmoid if model_type in ("deepseek_v3", "glm4_moe") else lambda logits: logits.softmax(-1)
    for layer in adapted.structure.moe_layers:
        router, experts = plain.get_submodule(layer.router), plain.get_submodule(layer.experts)
        block = NaiveBlock(experts, router, layer.shape.num_experts, score, NORMALIZED.get(model_type))
        plain.set_submodule(layer.experts, block)
        inside = [name for name in weights if name.startswith(f"{layer.experts}.")]
        weights |= {name.replace(layer.experts, f"{layer.experts}.experts"): weights.pop(name) for name in inside}
    output = torch.func.functional_call(plain, weights, kwargs={"input_ids": ids, "use_cache": False})
    loss = next_token_loss(output.logits, ids)
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return loss.detach(), {name: g for name, g in zip(leaves, gradients, strict=True) if g is not None}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("model_type", "base", "checkpointing"),
    [
        ("mixtral", "nf4", "full"),
        ("qwen3_moe", "fp32", "none"),
        ("qwen2_moe", "int8", "full"),
        ("gpt_oss", "fp32", "experts_only"),
        ("granitemoe", "fp32", "full"),
        ("deepseek_v3", "fp32", "none"),
    ],
)
def test_gradients_are_those_of_the_definition(model_type: str, base: str, checkpointing: str, tmp_path: Path) -> None:
    train = DENSE | {"checkpointing": checkpointing}
    more = {"norm_topk_prob": False} if model_type.startswith("qwen") else {}
    config = toy_config(model_type, **more)
    adapted = build_toy(config, tmp_path, MIXED, model={"base": base, "dtype": "fp32"}, train=train)
    adapted.model.train()
    ids = token_ids()
    loss, found = loss_and_gradients(adapted, ids)
    expected_loss, expected = reference(adapted, ids)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)
    assert_close(found, expected)
    # It is another gradient than the usual one, and the forward pass is the same.
    for layer in adapted.structure.moe_layers:
        bank = adapted.model.get_submodule(layer.experts)
        bank.context = replace(bank.context, dense=None)
    same, usual = loss_and_gradients(adapted, ids)
    assert same.equal(loss)
    routers = [name for name in found if adapted.part_of(name) == "router"]
    assert all((found[name] - usual[name]).norm() > 0.01 * usual[name].norm() for name in routers)


def test_the_score_is_known_of_every_catalog_architecture_but_four() -> None:
    types = {entry.config["model_type"] for name in model_names() if (entry := find_model(name)) is not None}
    unknown = set()
    for model_type in sorted(types):
        model = meta_model(toy_config(model_type))
        layers = read_structure(model).moe_layers
        if len(score_functions(model, layers)) < len(layers):
            unknown.add(model_type)
    assert unknown <= {"deepseek_v4", "gemma4", "llama4", "phimoe"}, unknown


def dense_run(folder: Path, **sections: Any) -> RunConfig:
    sections["train"] = DENSE | sections.get("train", {})
    return toy_run(write_toy(folder / "toy", "mixtral", num_hidden_layers=1), "mixtral", MIXED, **sections)


def test_it_takes_what_is_predicted(tmp_path: Path) -> None:
    """To the byte, part by part."""
    run = resolve(dense_run(tmp_path, model={"experts_on": "host"}), "cpu")
    measured = measure_run(run, "cpu", steps=2)
    predicted = trace(run, measured.routing)
    assert measured.trace is not None
    assert predicted.parts(predicted.peak) == measured.trace.parts(measured.trace.peak)
    assert predicted.host_peak == measured.host_bytes


def test_it_takes_three_products_of_each_expert(tmp_path: Path) -> None:
    """Counted by torch."""
    flops = []
    for dense in (True, False):
        train = {"dense_router_gradient": dense}
        adapted = build_toy(toy_config("mixtral"), tmp_path / str(dense), {"router": "all"}, train=train)
        adapted.model.train()
        with FlopCounterMode(depth=9, display=False) as counter:
            loss_and_gradients(adapted, token_ids())
        flops.append(counter.get_total_flops())
    shape = adapted.structure.moe_layers[0].shape
    each = 2 * token_ids().numel() * len(adapted.structure.moe_layers) * shape.intermediate
    assert flops[0] - flops[1] == each * shape.num_experts * (3 * shape.hidden + 1)  # ⟨dact, act⟩ too


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"adapt": {"router": "none"}}, "no router trains"),
        ({"parallel": {"fsdp": 2, "ep": 2}}, r"with parallel\.ep: 2 a rank holds some of them"),
    ],
)
def test_where_it_cannot_be_it_is_refused(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    adapt = MIXED | sections.pop("adapt", {})
    config = dense_run(tmp_path, **sections)
    config = config.model_copy(update={"adapt": config.adapt.model_validate(adapt)})
    with pytest.raises(UserError, match=f"train.dense_router_gradient: .*{message}"):
        resolve(config, "cpu")


def test_a_router_with_weights_of_another_kind_is_refused(tmp_path: Path) -> None:
    toy_config("phimoe").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"neither a softmax nor a sigmoid"):
        resolve(toy_run(tmp_path, "phimoe", {"router": "all"}, train=DENSE), "cpu")


def weights_of(configs: list[RunConfig]) -> list[dict[str, Tensor]]:
    return [steps.take(config, Ranks.join(config.parallel, "cpu"), 2, 4).weights for config in configs]


@pytest.mark.full
def test_ranks_take_the_step_of_one(small_model: Path) -> None:
    """Weights that are shared, and such that every rank has whole."""

    def config(**parallel: int) -> RunConfig:
        train = DENSE | {"accumulate": 1, "max_grad_norm": 0.0}
        optimizer = {"name": "sgd", "lr": 1e-2}
        unread = Path("unread")
        return small.run_config(small_model, unread, unread, train=train, optimizer=optimizer, parallel=parallel)

    (alone,) = weights_of([config()])
    for of_rank in world.run(2, weights_of, [config(fsdp=2), config(replicate=2)]):
        for weights in of_rank:
            assert_close(weights, alone)
