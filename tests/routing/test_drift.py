"""`moetune drift`, against the model's own router logits before and after training."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moetune.adapt.build import Adapted
from moetune.errors import UserError
from moetune.routing.data_sets import read_sources
from moetune.routing.drift import Drift, drift, jensen_shannon
from moetune.training.folder.checkpoint import read_trained
from tests import small
from tests.resolved import build, train


@pytest.fixture(scope="module")
def run(small_model: Path, small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Routers and experts, three steps that are large enough to move tokens."""
    folder = tmp_path_factory.mktemp("drift") / "run"
    train(
        small.run_config(
            small_model, small_data, folder, "experts", optimizer={"lr": 0.05}, data={"eval": str(small_data)}
        )
    )
    return folder


def sets_of(adapted: Adapted, data: Path) -> list[list[frozenset[int]]]:
    """By layer, the experts of every token that carries loss, row by row in the order in which drift reads them."""
    sources, _ = read_sources(adapted.run, [str(data)], 10**9)
    found: list[list[frozenset[int]]] = [[] for _ in range(small.LAYERS)]
    for row in sources[0].rows:
        with torch.no_grad():
            logits = adapted.model.eval()(
                input_ids=torch.tensor([row["input_ids"]]), use_cache=False, output_router_logits=True
            ).router_logits
        carries = [label != -100 for label in row["labels"][1:]]
        for layer, logits_TE in enumerate(logits):
            ids = logits_TE.topk(small.TOP_K).indices.tolist()
            found[layer] += [frozenset(of) for of, counts in zip(ids, carries, strict=False) if counts]
    return found


@pytest.mark.full
def test_drift_is_that_of_the_models_own_logits(run: Path, small_model: Path, small_data: Path) -> None:
    found = drift(run, device="cpu")
    config = small.run_config(small_model, small_data, run, "experts", optimizer={"lr": 0.05})
    adapted = build(config, "cpu")
    before = sets_of(adapted, small_data)
    read_trained(run / "checkpoints" / "step-3", adapted)
    after = sets_of(adapted, small_data)
    assert found.tokens == len(before[0])
    for layer, drifted in found.layers.items():
        one, two = (
            [sum(expert in chosen for chosen in sets[layer]) for expert in range(small.EXPERTS)]
            for sets in (before, after)
        )
        assert (list(drifted.before), list(drifted.after)) == (one, two)
        changed = sum(a != b for a, b in zip(before[layer], after[layer], strict=True))
        assert drifted.changed == pytest.approx(changed / found.tokens)
        assert drifted.distance == pytest.approx(jensen_shannon(one, two))
        assert drifted.died == tuple(e for e in range(small.EXPERTS) if one[e] and not two[e])
    assert found.changed > 0
    moved = {t for layer in range(small.LAYERS) for t in range(found.tokens) if before[layer][t] != after[layer][t]}
    assert found.changed == pytest.approx(len(moved) / found.tokens)


def test_jensen_shannon_by_hand() -> None:
    assert jensen_shannon([1, 2, 3], [2, 4, 6]) == 0
    assert jensen_shannon([5, 0], [0, 7]) == 1
    by_hand = math.sqrt((math.log2(4 / 3) + 0.5 * math.log2(2 / 3) + 0.5 * math.log2(2)) / 2)
    assert jensen_shannon([4, 0], [1, 1]) == pytest.approx(by_hand)


def test_the_command(run: Path, moetune: Callable[..., Any], tmp_path: Path) -> None:
    ended = moetune("drift", run, "--tokens", "50", "--json", "--figure", tmp_path / "heat.svg")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["schema"] == 1
    assert found["step"] == 3
    assert len(found["layers"]) == small.LAYERS
    assert "after step 3" in (tmp_path / "heat.svg").read_text()
    assert json.loads((run / "drift.json").read_text()) == found
    assert moetune("report", run, "--no-timeline", "--out", tmp_path / "page.html").code == 0
    assert "tokens, before and after step 3" in (tmp_path / "page.html").read_text()
    assert moetune("drift", run, "--figure", "heat.pdf").code == 2
    assert moetune("drift", tmp_path).code == 2


def test_without_held_out_data_some_is_asked_for(small_model: Path, small_data: Path, tmp_path: Path) -> None:
    train(small.run_config(small_model, small_data, tmp_path / "run", train={"steps": 1}))
    with pytest.raises(UserError, match="has no held-out data"):
        drift(tmp_path / "run")
    found: Drift = drift(tmp_path / "run", str(small_data))
    assert found.step == 1
