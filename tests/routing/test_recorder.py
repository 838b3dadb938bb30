"""What is counted, against brute force on the plain model: exactly, however rows are batched, packed and padded."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moetune.adapt.attention import document_inputs
from moetune.adapt.build import Adapted
from moetune.errors import UserError
from moetune.routing.recorder import Recorder, documents_of
from moetune.run.scores import LayerScores, Statistics
from moetune.training.isolation import refuse_leaky_packing
from moetune.training.step.batch import collate
from moetune.training.step.loss import IGNORED
from tests.reference import build_toy, plain_model, plain_weights
from tests.thinned import thinned
from tests.toys import EXPERTS, VOCAB, expert_model_types, toy_config

NO_LOGITS = {"deepseek_v4", "zaya"}
"""Routers by a table of tokens, whose logits transformers leaves out; one with a class more than there are experts."""
NOT_BY_LOGITS = {"hy_v3", "kolibri1", "minimax_m2"}
"""Whose choice takes more than the logits: the plain model's own is what counts are compared with."""
TYPES = thinned((t for t in expert_model_types() if t not in NO_LOGITS), 8, ("mixtral", "gpt_oss", "deepseek_v3"))
PAD, LENGTH = 1, 24
DOCUMENTS = (5, 9, 3, 11, 7, 13, 2, 6)


def documents() -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of each, with a prompt in some that is not trained on."""
    draw = np.random.default_rng(5)
    found = []
    for number, length in enumerate(DOCUMENTS):
        ids = draw.integers(3, VOCAB, length).tolist()
        prompt = 1 if number % 2 else max(1, length // 3)
        found.append((ids, [IGNORED] * prompt + ids[prompt:]))
    return found


def packed_rows() -> list[dict[str, list[int]]]:
    """The documents one after the other in rows of 24 tokens, and padding, which is one more document."""
    rows: list[dict[str, list[int]]] = []
    for ids, labels in documents():
        if not rows or len(rows[-1]["input_ids"]) + len(ids) > LENGTH:
            rows.append({"input_ids": [], "labels": [], "position_ids": [], "is_token": []})
        row = rows[-1]
        row["input_ids"] += ids
        row["labels"] += labels
        row["position_ids"] += range(len(ids))
        row["is_token"] += [1] * len(ids)
    for row in rows:
        rest = LENGTH - len(row["input_ids"])
        row["input_ids"] += [PAD] * rest
        row["labels"] += [IGNORED] * rest
        row["position_ids"] += range(rest)
        row["is_token"] += [0] * rest
    return rows


def recorded(adapted: Adapted, rows: Sequence[dict[str, Any]], size: int) -> dict[int, LayerScores]:
    recorder = Recorder(adapted)
    for number, at in enumerate(range(0, len(rows), size)):
        batch = collate(rows[at : at + size], PAD, document_inputs=document_inputs(adapted.model))
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "is_token")}
        with recorder.batch(batch, documents_of(rows[at : at + size]), 0, number), torch.no_grad():
            adapted.model(**inputs, use_cache=False)
    recorder.remove()
    return recorder.scores([0])


@dataclass
class Token:
    """One token in one layer: its logits, its experts with their weights and outputs, whether it carries loss."""

    logits: list[float]
    ids: list[int]
    weights: list[float]
    norms: list[float]
    carries: bool


def brute_force(adapted: Adapted) -> dict[int, list[Token]]:
    """Every token of every document in every layer of the plain model, which is given one document at a time."""
    plain = plain_model(adapted.model.config)
    plain.load_state_dict(plain_weights(adapted, plain, dict(adapted.trainable())), strict=False)
    found: dict[int, list[Token]] = {layer.index: [] for layer in adapted.structure.moe_layers}
    seen: dict[int, tuple[Tensor, ...]] = {}
    for layer in adapted.structure.moe_layers:

        def saw(module: Any, args: Any, output: Any = None, index: int = layer.index) -> None:
            seen[index] = args

        plain.get_submodule(layer.experts).register_forward_hook(saw)
    for ids, labels in documents():
        with torch.no_grad():
            output = plain(input_ids=torch.tensor([ids]), use_cache=False, output_router_logits=True)
        logits = output.router_logits
        assert len(logits) == len(found)
        for layer, logits_TE in zip(adapted.structure.moe_layers, logits, strict=True):
            experts = plain.get_submodule(layer.experts)
            x, chosen, weights = seen[layer.index]
            correction = getattr(plain.get_submodule(layer.router), "e_score_correction_bias", None)
            for token in range(len(ids)):
                norms = [
                    experts(x[token : token + 1], torch.tensor([[e]]), torch.ones(1, 1)).norm().item()
                    for e in chosen[token].tolist()
                ]
                assert adapted.structure.model_type in NOT_BY_LOGITS or set(chosen[token].tolist()) == set(
                    by_logits(logits_TE[token], layer.top_k, correction)
                )
                carries = token + 1 < len(ids) and labels[token + 1] != IGNORED
                found[layer.index].append(
                    Token(logits_TE[token].tolist(), chosen[token].tolist(), weights[token].tolist(), norms, carries)
                )
    return found


def by_logits(logits_E: Tensor, top_k: int, correction: Tensor | None) -> list[int]:
    """The choice that logits alone make; with a correction, which is of sigmoids, the K largest corrected ones."""
    values = logits_E if correction is None or not correction.any() else logits_E.sigmoid() + correction.flatten()
    return values.topk(top_k).indices.tolist()


def packs(adapted: Adapted) -> bool:
    """Whether documents may be packed; where they would see each other, moetune score refuses."""
    try:
        refuse_leaky_packing(adapted.model, 1, 16)
    except UserError:
        return False
    return True


def assert_is(statistics: Statistics, tokens: list[Token], experts: int) -> None:
    """Counts are equal; what is a sum of floats, within rounding of float32."""
    choices = [
        (token, e, w, n) for token in tokens for e, w, n in zip(token.ids, token.weights, token.norms, strict=True)
    ]
    counts = Counter(e for _, e, _, _ in choices)
    assert statistics.count == len(tokens)
    assert statistics.tokens == [counts[expert] for expert in range(experts)]
    assert statistics.unused == [expert for expert in range(experts) if not counts[expert]]
    together = Counter(pair for token in tokens for pair in itertools.combinations(sorted(token.ids), 2))
    assert statistics.pairs == [[together[e, f] for f in range(e + 1, experts)] for e in range(experts - 1)]
    for expert in range(experts):
        mine = [(w, n) for _, e, w, n in choices if e == expert]
        total = sum(w for w, _ in mine)
        assert statistics.share[expert] == pytest.approx(counts[expert] / len(choices))
        assert statistics.weight_sum[expert] == pytest.approx(total, rel=1e-4)
        assert statistics.weight_mean[expert] == pytest.approx(total / max(len(mine), 1), rel=1e-4)
        assert statistics.reap[expert] == pytest.approx(sum(w * n for w, n in mine) / max(len(mine), 1), rel=1e-4)
    logits_TE = torch.tensor([token.logits for token in tokens], dtype=torch.double)
    gives_probabilities = torch.allclose(logits_TE.sum(-1), torch.ones(len(tokens), dtype=torch.double))
    p_TE = logits_TE if gives_probabilities else logits_TE.softmax(-1)
    assert statistics.probability == pytest.approx(p_TE.mean(0).tolist(), rel=1e-4)
    assert statistics.entropy == pytest.approx(-(p_TE * p_TE.log()).sum(-1).mean().item(), rel=1e-4)


@pytest.mark.one_in(10)
@pytest.mark.parametrize("model_type", TYPES)
def test_counts_are_those_of_the_plain_model(model_type: str, tmp_path: Path) -> None:
    adapted = build_toy(toy_config(model_type), tmp_path, {"router": "all"}, model={"base": "fp32", "dtype": "fp32"})
    with torch.no_grad():
        for name, buffer in adapted.model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.05, generator=torch.Generator().manual_seed(len(name)))
    expected = brute_force(adapted)
    separate = [{"input_ids": ids, "labels": labels} for ids, labels in documents()]
    both = (separate, packed_rows()) if packs(adapted) else (separate,)
    ways: Iterator[tuple[list[dict[str, Any]], int]] = itertools.product(both, (1, 3, 8))
    for rows, size in ways:
        found = recorded(adapted, rows, size)
        assert found.keys() == expected.keys()
        for index, tokens in expected.items():
            experts = found[index].num_experts
            assert_is(found[index].all, tokens, experts)
            assert_is(found[index].loss, [token for token in tokens if token.carries], experts)


def test_a_token_that_skips_the_experts_is_not_counted(tmp_path: Path) -> None:
    """ZAYA's routers have a class more than there are experts, whose tokens expert 0 gets with weight 0."""
    adapted = build_toy(toy_config("zaya"), tmp_path, {"router": "all"}, model={"base": "fp32", "dtype": "fp32"})
    classes: dict[int, list[int]] = {}
    for layer in adapted.structure.moe_layers:
        router = adapted.model.get_submodule(layer.router)
        router.get_buffer("balancing_biases").zero_()

        def saw(module: Any, args: Any, output: Any, index: int = layer.index) -> None:
            classes[index] = output[0].argmax(-1).tolist()

        router.register_forward_hook(saw)
    ids, labels = documents()[3]
    found = recorded(adapted, [{"input_ids": ids, "labels": labels}], 1)
    for index, scores in found.items():
        assert scores.all.tokens == [classes[index].count(expert) for expert in range(EXPERTS)]
    assert any(EXPERTS in chosen for chosen in classes.values())
