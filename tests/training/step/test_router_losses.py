"""The router losses against their formulas, term by term, and what they do to gradients and to the load."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from moetune.adapt.build import Adapted
from moetune.errors import UserError
from moetune.run.resolve import resolve
from moetune.training.step import router_losses
from moetune.training.step.batch import Batch, collate
from moetune.training.step.micro_step import forward_pass, token_loss
from moetune.training.step.router_losses import RouterWatch, losses_of
from tests import small
from tests.reference import build_toy, plain_model, plain_weights, run_config
from tests.resolved import build
from tests.toys import toy_config

PAD = 3
ROWS = [{"input_ids": list(range(20, 20 + length)), "labels": list(range(20, 20 + length))} for length in (4, 11, 7)]


def built(model: Path, adapt: str = "router", **train: Any) -> Adapted:
    return build(small.run_config(model, Path("unused"), Path("unused"), adapt, train=train), "cpu")


def watched(adapted: Adapted, batch: Batch) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Balance loss, z-loss and expert load of one forward pass."""
    watch = RouterWatch(adapted)
    with watch.recording(batch.get("attention_mask"), logits=True) as routed:
        token_loss(adapted.model, batch)
    return *losses_of(watch.statistics(routed)), routed.load


def by_hand(adapted: Adapted, batch: Batch) -> tuple[float, float, list[list[int]]]:
    """The same, token by token, from the model's own router logits."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits = adapted.model(**inputs, use_cache=False, output_router_logits=True).router_logits
    counts_token = batch["attention_mask"].flatten().bool().tolist()
    fractions, probabilities, zs, loads = [], [], [], []
    for layer in logits:
        tokens = [row for row, counts in zip(layer.double().tolist(), counts_token, strict=True) if counts]
        load, probability, z = [0] * small.EXPERTS, [0.0] * small.EXPERTS, 0.0
        for row in tokens:
            sum_exp = sum(math.exp(value) for value in row)
            for expert in sorted(range(small.EXPERTS), key=row.__getitem__)[-small.TOP_K :]:
                load[expert] += 1
            for expert, value in enumerate(row):
                probability[expert] += math.exp(value) / sum_exp / len(tokens)
            z += math.log(sum_exp) ** 2 / len(tokens)
        fractions.append([count / len(tokens) for count in load])
        probabilities.append(probability)
        zs.append(z)
        loads.append(load)
    f_E, p_E = ([sum(of) / len(of) for of in zip(*layers, strict=True)] for layers in (fractions, probabilities))
    balance = small.EXPERTS * sum(f * p for f, p in zip(f_E, p_E, strict=True))
    return balance, sum(zs) / len(zs), loads


def test_losses_and_load_are_those_of_the_formulas(small_model: Path) -> None:
    adapted, batch = built(small_model), collate(ROWS, PAD)
    assert not batch["attention_mask"].all()
    balance, z, load = watched(adapted, batch)
    true_balance, true_z, true_load = by_hand(adapted, batch)
    assert balance.item() == pytest.approx(true_balance, rel=1e-5)
    assert z.item() == pytest.approx(true_z, rel=1e-5)
    assert [tokens.tolist() for tokens in load.values()] == true_load
    assert small.TOP_K < balance.item() < small.EXPERTS


@pytest.mark.one_in(2)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize(("key", "which"), [("router_aux_loss", 0), ("router_z_loss", 1)])
def test_a_loss_adds_its_own_gradient(key: str, which: int, checkpointing: str, small_model: Path) -> None:
    """Coefficient × share of the tokens × the loss's gradient, through the router and the layers before it."""
    batch = collate(ROWS, PAD)
    gradients = []
    for coefficient in (0.0, 0.5):
        adapted = built(small_model, checkpointing=checkpointing, **{key: coefficient})
        config = small.run_config(small_model, Path(), Path(), train={key: coefficient})
        forward_pass(adapted.model, batch, 2 * 19, RouterWatch(adapted), config.train)[0].backward()
        gradients.append({name: p.grad for name, p in adapted.trainable().items() if p.grad is not None})
    adapted = built(small_model, checkpointing=checkpointing)
    loss = watched(adapted, batch)[which]
    alone = dict(zip(adapted.trainable(), torch.autograd.grad(loss, list(adapted.trainable().values())), strict=True))
    for name, gradient in alone.items():
        added = gradients[1][name] - gradients[0][name]
        assert gradient.abs().max() > 1e-4
        torch.testing.assert_close(added, 0.5 * 0.5 * gradient, rtol=1e-3, atol=1e-5)


def test_a_router_without_logits_is_refused(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_losses, "find_logits", lambda output, num_experts: None)
    with pytest.raises(UserError, match=r"router of layer 0 \(model.layers.0.mlp.gate\) returns no logits; set both"):
        watched(built(small_model), collate(ROWS, PAD))


def test_padding_of_packed_sequences_does_not_count(small_model: Path) -> None:
    ids = list(range(20, 44))
    alone = {"input_ids": ids, "labels": ids, "position_ids": list(range(24)), "is_token": [1] * 24}
    padded = {
        "input_ids": ids + [PAD] * 40,
        "labels": ids + [-100] * 40,
        "position_ids": [*range(24), *range(40)],
        "is_token": [1] * 24 + [0] * 40,
    }
    settings = {"router_aux_loss": 0.3, "router_z_loss": 0.2}
    config = small.run_config(small_model, Path(), Path(), train=settings)
    results = []
    for row in (alone, padded):
        adapted = built(small_model, **settings)
        _, done = forward_pass(adapted.model, collate([row], PAD), 23, RouterWatch(adapted), config.train)
        results.append((done.loss, done.router_loss, done.load))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_the_balance_loss_is_that_of_transformers(model_type: str, tmp_path: Path) -> None:
    """Value and every gradient, in float32, of a batch with padding; transformers' own, from its own forward pass."""
    adapt = {"router": "all", "also": ["norm", "attention", "embedding"]}
    adapted = build_toy(toy_config(model_type), tmp_path, adapt, model={"base": "fp32", "dtype": "fp32"})
    rows = [{"input_ids": list(range(20, 20 + n)), "labels": list(range(20, 20 + n))} for n in (4, 11, 7)]
    batch = collate(rows, PAD)
    watch = RouterWatch(adapted)
    with watch.recording(batch["attention_mask"], logits=True) as routed:
        token_loss(adapted.model, batch)
    ours, _ = losses_of(watch.statistics(routed))
    mine = adapted.trainable()
    gradients = torch.autograd.grad(ours, list(mine.values()), allow_unused=True)
    plain = plain_model(adapted.model.config)
    plain.load_state_dict(plain_weights(adapted, plain, dict(mine)), strict=False)
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    theirs = plain(**inputs, use_cache=False, output_router_logits=True).aux_loss
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    its = dict(plain.named_parameters())
    expected = torch.autograd.grad(theirs, [its[name] for name in mine], allow_unused=True)
    some = 0
    for name, found, wanted in zip(mine, gradients, expected, strict=True):
        assert (found is None) == (wanted is None), name
        if found is not None and wanted is not None:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-8)
            some += bool(wanted.abs().max() > 1e-6)
    assert some > 10


def test_a_bias_that_shifts_the_choice_counts_here_and_not_in_transformers(tmp_path: Path) -> None:
    adapted = build_toy(
        toy_config("ernie4_5_moe"), tmp_path, {"router": "all"}, model={"base": "fp32", "dtype": "fp32"}
    )
    batch = collate(ROWS, PAD)
    tokens = int(batch["attention_mask"].sum())
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    for bias in (0.0, 1.0):
        for name, value in (*adapted.model.named_parameters(), *adapted.model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                value.data[..., 0] = bias
        plain = plain_model(adapted.model.config)
        plain.load_state_dict(plain_weights(adapted, plain, dict(adapted.trainable())), strict=False)
        theirs = plain(**inputs, use_cache=False, output_router_logits=True).aux_loss.item()
        ours, _, load = watched(adapted, batch)
        assert all(of_layer[0] == tokens for of_layer in load.values()) == bool(bias)
        assert (ours.item() == pytest.approx(theirs, rel=1e-5)) == (bias == 0.0)


def test_a_token_that_skips_the_experts_is_no_load(tmp_path: Path) -> None:
    """ZAYA's routers have a class more than there are experts, whose tokens expert 0 gets with weight 0."""
    adapted = build_toy(toy_config("zaya"), tmp_path, {"router": "all"}, model={"base": "fp32", "dtype": "fp32"})
    chosen: dict[int, list[int]] = {}
    for layer in adapted.structure.moe_layers:
        router = adapted.model.get_submodule(layer.router)
        biases = router.get_buffer("balancing_biases")
        biases[-1] = 0.0

        def saw(module: Any, args: Any, output: Any, index: int = layer.index, biases: Tensor = biases) -> None:
            chosen[index] = (output[0].softmax(-1) + biases).argmax(-1).tolist()

        router.register_forward_hook(saw)
    watch = RouterWatch(adapted)
    with watch.recording(None, logits=False) as routed:
        token_loss(adapted.model, collate(ROWS[1:2], PAD))
    for layer in adapted.structure.moe_layers:
        experts = layer.shape.num_experts
        assert routed.load[layer.index].tolist() == [chosen[layer.index].count(expert) for expert in range(experts)]
    assert any(layer.shape.num_experts in chosen[layer.index] for layer in adapted.structure.moe_layers)


def test_per_layer_it_is_the_mean_of_each_layers(small_model: Path) -> None:
    adapted, batch = built(small_model), collate(ROWS, PAD)
    watch = RouterWatch(adapted)
    with watch.recording(batch["attention_mask"], logits=True) as routed:
        token_loss(adapted.model, batch)
    alone = [
        load_balancing_loss_func((logits,), small.EXPERTS, small.TOP_K, batch["attention_mask"]).item()
        for logits in routed.logits.values()
    ]
    balance, _ = losses_of(watch.statistics(routed), per_layer=True)
    assert balance.item() == pytest.approx(sum(alone) / len(alone), rel=1e-6)


def test_gemma_4_gives_logits_not_probabilities(tmp_path: Path) -> None:
    adapted = build_toy(toy_config("gemma4_text"), tmp_path, {"router": "all"}, model={"base": "fp32", "dtype": "fp32"})
    layer = adapted.structure.moe_layers[0]
    seen: list[Tensor] = []
    adapted.model.get_submodule(layer.router).register_forward_hook(lambda module, args, output: seen.append(output[0]))
    watch = RouterWatch(adapted)
    with watch.recording(None, logits=True) as routed, torch.no_grad():
        adapted.model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
    torch.testing.assert_close(routed.logits[layer.index].softmax(-1), seen[0])


def test_auto_is_the_architectures_own_coefficient(small_model: Path, tmp_path: Path) -> None:
    config = small.run_config(small_model, Path(), Path(), train={"router_aux_loss": "auto"})
    assert resolve(config, "cpu").config.train.router_aux_loss == 0.001
    toy_config("deepseek_v3").save_pretrained(tmp_path)
    without = run_config(tmp_path, {"router": "all"}, train={"router_aux_loss": "auto"})
    with pytest.raises(UserError, match=r"auto, and the configuration of .* has no router_aux_loss_coef"):
        resolve(without, "cpu")
    with pytest.raises(ValueError, match="neither a number from 0 to 1e6 nor auto"):
        small.run_config(small_model, Path(), Path(), train={"router_aux_loss": "yes"})
