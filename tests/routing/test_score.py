"""`moetune score` and `select`: the file that is written, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.memory.assumed_routing import parse_routing
from moetune.routing.drift import drift
from moetune.routing.recorder import Recorder
from moetune.routing.score import score, to_score
from moetune.routing.select import within_budget
from moetune.run.folder_files import read_expert_load
from moetune.run.resolve import resolve
from moetune.run.scores import Scores, read_scores
from tests import small
from tests.resolved import train
from tests.routing.made import write_scores

Moetune = Callable[..., Any]
SHORT = {"accumulate": 1, "micro_batch": 1, "sequence_length": 16}


def scored(model: Path, data: list[Path], out: Path | None = None, tokens: int = 10**9, **more: Any) -> Scores:
    config = small.run_config(model, data[0], Path("unused"))
    return score(resolve(to_score(config), "cpu"), [str(file) for file in data], tokens, out, device="cpu", **more)


@pytest.fixture(scope="module")
def whole(small_model: Path, small_data: Path) -> Scores:
    return scored(small_model, [small_data])


def test_counts_add_up(whole: Scores) -> None:
    assert whole.tokens > whole.loss_tokens > 0
    for layer, load in whole.expert_load.items():
        assert sum(load) == small.TOP_K * whole.tokens
        assert load == whole.layers[layer].all.tokens
        of_loss = whole.layers[layer].loss
        assert of_loss.count == whole.loss_tokens
        assert sum(of_loss.tokens) == small.TOP_K * whole.loss_tokens
        assert sum(map(sum, of_loss.pairs)) == whole.loss_tokens  # two experts a token are one pair
        assert sum(of_loss.weight_sum) == pytest.approx(whole.loss_tokens)  # Mixtral's weights sum to one
        assert sum(of_loss.probability or ()) == pytest.approx(1)
        for share, (low, high) in zip(of_loss.share, of_loss.interval, strict=True):
            assert 0 <= low <= share <= high <= 1
            assert high - low > 0


def test_neither_batches_nor_packing_change_a_count(whole: Scores, small_model: Path, small_data: Path) -> None:
    config = small.run_config(
        small_model, small_data, Path("unused"), train={"micro_batch": 5, "seed": 3}, data={"packing": True}
    )
    other = score(resolve(to_score(config), "cpu"), [str(small_data)], 10**9, device="cpu")
    assert other.expert_load == whole.expert_load
    for layer, of_layer in whole.layers.items():
        for scope in ("loss", "all"):
            one, two = getattr(of_layer, scope), getattr(other.layers[layer], scope)
            assert (one.tokens, one.pairs, one.count) == (two.tokens, two.pairs, two.count)
            assert one.reap == pytest.approx(two.reap, rel=1e-5)


def test_experts_may_be_on_the_host(whole: Scores, small_model: Path, small_data: Path) -> None:
    config = small.run_config(small_model, small_data, Path("unused"), model={"experts_on": "host"})
    other = score(resolve(to_score(config), "cpu"), [str(small_data)], 10**9, device="cpu")
    assert (other.expert_load, other.layers) == (whole.expert_load, whole.layers)


@pytest.mark.full
def test_scores_begin_where_training_does(
    whole: Scores, small_model: Path, small_data: Path, tmp_path: Path, moetune: Moetune
) -> None:
    """Routers that were trained, as a delta: `adapt.start_from` scores the base with them."""
    config = small.run_config(small_model, small_data, tmp_path / "run", optimizer={"lr": 0.2})
    train(config)
    ended = moetune("export", tmp_path / "run", "--format", "delta", "--out", tmp_path / "delta")
    assert ended.code == 0, ended.err
    started = small.run_config(
        small_model, small_data, Path("unused"), adapt={"router": "all", "start_from": str(tmp_path / "delta")}
    )
    after = score(resolve(to_score(started), "cpu"), [str(small_data)], 10**9, device="cpu")
    assert after.run["start_from"] == str(tmp_path / "delta")
    assert after.expert_load != whole.expert_load
    found = drift(tmp_path / "run", str(small_data), device="cpu")
    assert {n: list(layer.after) for n, layer in found.layers.items()} == {
        n: layer.loss.tokens for n, layer in after.layers.items()
    }


def test_an_interrupted_pass_leaves_nothing(
    whole: Scores, small_model: Path, small_data: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    out, calls, add = tmp_path / "scores.json", iter(range(10**9)), Recorder._add

    def interrupted(*args: Any) -> None:
        if next(calls) == small.LAYERS + 1:  # in the second batch
            raise KeyboardInterrupt
        add(*args)

    monkeypatch.setattr(Recorder, "_add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scored(small_model, [small_data], out)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    assert scored(small_model, [small_data], out) == read_scores(out, "it") == whole
    assert list(tmp_path.iterdir()) == [out]


def test_several_files_are_kept_apart_and_added(whole: Scores, small_model: Path, tmp_path: Path) -> None:
    halves = [small.write_data(tmp_path / f"{n}.jsonl", small.DATA[n::2]) for n in (0, 1)]
    both = scored(small_model, halves)
    assert both.expert_load == whole.expert_load
    for layer, of_layer in both.layers.items():
        parts = [one.layers[layer].loss.tokens for one in both.data if one.layers is not None]
        assert len(parts) == 2
        assert [a + b for a, b in zip(*parts, strict=True)] == of_layer.loss.tokens == whole.layers[layer].loss.tokens
    assert [one.tokens for one in both.data] != [0, 0]
    assert both.data[0].digest != both.data[1].digest


def test_no_more_rows_are_read_than_asked_for(whole: Scores, small_model: Path, small_data: Path) -> None:
    some = scored(small_model, [small_data], tokens=100)
    assert 100 <= some.tokens < 100 + 64
    assert some.tokens < whole.tokens


def test_the_file_is_a_routing_and_a_load(whole: Scores, tmp_path: Path) -> None:
    file = tmp_path / "scores.json"
    file.write_text(whole.to_text())
    assert dict(parse_routing(str(file)).load) == read_expert_load(file, "parallel.load")
    assert read_expert_load(file, "it") == {layer: tuple(map(float, load)) for layer, load in whole.expert_load.items()}


def test_score_then_select_then_count(
    moetune: Moetune, small_model: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump(small.run_file(small_model, small_data, tmp_path / "out")))
    ended = moetune("score", run_file, "--tokens", "200", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["expert_load"] == json.loads((tmp_path / "scores.json").read_text())["expert_load"]
    assert moetune("score", run_file).code == 2  # the output exists

    ended = moetune("select", "scores.json", "--k", "2", "--run", run_file, "--out", "chosen.yaml", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["total_random_share"] == 0.5 < found["total_share"] < 1
    counted = json.loads(moetune("count", "--run", "chosen.yaml", "--json").out)
    assert counted["trainable"]["experts"] == 2 * 2 * counted["per_expert"]
    by_reference = ["--set", "adapt.experts={from: scores.json, k: 2}"]
    assert json.loads(moetune("count", "--run", run_file, *by_reference, "--json").out) == counted

    ended = moetune("select", "scores.json", "--p", "0.5", "--as", "lora", "--rule", "gate")
    written = yaml.safe_load(ended.out)["adapt"]["lora"]
    assert set(written["ids"]) == {0, 1}
    assert written["targets"] == ["experts"]
    assert "share of the routed tokens" in ended.err


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("part", ["experts", pytest.param("lora", marks=pytest.mark.full)])
def test_a_budget_takes_the_most_that_fits(part: str, small_model: Path, tmp_path: Path) -> None:
    """The trace says that what is chosen fits, and that one expert a layer more does not."""
    from moetune.planning.predict import predict

    scores = write_scores(tmp_path / "scores.json", {layer: [1, 4, 3, 2] for layer in range(small.LAYERS)})

    def run(**size: Any) -> RunConfig:
        choice = {"from": str(scores), **size}
        lora = {"rank": 32, "alpha": 8, "targets": ["experts"], "ids": choice}
        adapt = {"experts": choice} if part == "experts" else {"lora": lora}
        return small.run_config(
            small_model, Path("unused"), Path("unused"), adapt=adapt | {"router": "none"}, train=SHORT
        )

    budget = f"{predict(resolve(run(k=2), 'cuda'), gpu='44GiB').required}B"
    tried: list[tuple[int, bool]] = []
    found = within_budget(run(budget=budget), lambda k, fits: tried.append((k, fits)))
    settled = resolve(found, "cuda")
    chosen = settled.selection.experts if part == "experts" else settled.selection.lora_experts
    assert chosen == {0: (1, 2), 1: (1, 2)}
    assert set(tried[-2:]) == {(2, True), (3, False)}  # traces, of the experts that are chosen
    assert within_budget(found) is found
    with pytest.raises(UserError, match="one expert of each of 2 layers takes"):
        within_budget(run(budget="1MiB"))
