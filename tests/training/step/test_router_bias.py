"""Correction biases: updated by the load that is logged, saved, resumed and exported with their routers; or left."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.exporting.export import export
from moetune.parallel.ranks import Ranks
from moetune.run.resolve import resolve
from tests import small
from tests.exporting.runs import make_toy, tensors_of
from tests.parallel import steps, world
from tests.resolved import build, train

RATE = 0.05
BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"
TRAIN = {"router_bias_rate": RATE, "steps": 4, "save_every": 2, "log_every": 1, "keep_checkpoints": 9}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3 of two layers, the first of them dense, with biases that are not zero, on disk."""
    folder = tmp_path_factory.mktemp("models") / "small-deepseek"
    vocabulary = small.write_tokenizer(folder)["vocab_size"]
    model = make_toy("deepseek_v3", vocab_size=vocabulary, num_hidden_layers=3)
    with torch.no_grad():
        for layer in (1, 2):
            model.get_buffer(BIAS.format(layer)).normal_(std=0.02, generator=torch.Generator().manual_seed(layer))
    model.save_pretrained(folder)
    return folder


def run_config(base: Path, data: Path, output: Path, adapt: dict[str, Any] | None = None, **more: Any) -> RunConfig:
    adapt = {"router": "all"} if adapt is None else adapt
    return small.run_config(base, data, output, adapt=adapt, train=TRAIN | more, model={"dtype": "fp32"})


def biases(file: Path) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in load_file(file).items() if name.endswith("e_score_correction_bias")}


def by_metrics(base: Path, output: Path, layers: tuple[int, ...], upto: int) -> dict[str, Tensor]:
    """What the rule makes of the loads that were logged."""
    before = tensors_of(base)
    found = {BIAS.format(layer): before[BIAS.format(layer)].clone() for layer in layers}
    for line in small.read_metrics(output):
        if "routing" in line and line["step"] <= upto:
            for layer in layers:
                load = torch.tensor(line["routing"][str(layer)]["tokens"], dtype=torch.float32)
                found[BIAS.format(layer)] += RATE * torch.sign(load.mean() - load)
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32
        assert found[name].equal(tensor), name


@pytest.fixture(scope="module")
def trained(base: Path, small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "run"
    train(run_config(base, small_data, output))
    return output


def test_biases_follow_the_load(base: Path, trained: Path) -> None:
    before = tensors_of(base)
    for step in (2, 4):
        found = biases(trained / f"checkpoints/step-{step}/trained.safetensors")
        assert_same(found, by_metrics(base, trained, (1, 2), step))
        assert all(not tensor.equal(before[name]) for name, tensor in found.items())


def test_a_run_goes_on_with_them(base: Path, small_data: Path, trained: Path, tmp_path: Path) -> None:
    train(run_config(base, small_data, tmp_path / "run", steps=2))
    train(run_config(base, small_data, tmp_path / "run"), resume="auto")
    one, two = (load_file(run / "checkpoints/step-4/trained.safetensors") for run in (trained, tmp_path / "run"))
    assert one.keys() == two.keys()
    assert all(one[name].equal(two[name]) for name in one)


def test_exports_have_them(base: Path, small_data: Path, trained: Path, tmp_path: Path) -> None:
    found = biases(trained / "checkpoints/step-4/trained.safetensors")
    for form in ("delta", "merged"):
        export(trained, form, tmp_path / form)
    assert_same(biases(tmp_path / "delta/delta.safetensors"), found)
    merged = tensors_of(tmp_path / "merged")
    assert all(merged[name].equal(tensor) for name, tensor in found.items())
    goes_on = run_config(
        base,
        small_data,
        tmp_path / "next",
        {"router": "all", "start_from": str(tmp_path / "delta")},
        steps=1,
        save_every=1,
    )
    train(goes_on)
    first = biases(tmp_path / "next/checkpoints/step-1/trained.safetensors")
    (line,) = (line for line in small.read_metrics(tmp_path / "next") if "routing" in line)
    for layer in (1, 2):
        load = torch.tensor(line["routing"][str(layer)]["tokens"], dtype=torch.float32)
        expected = found[BIAS.format(layer)] + RATE * torch.sign(load.mean() - load)
        assert first[BIAS.format(layer)].equal(expected)


@pytest.mark.full
def test_an_adapter_has_them(base: Path, small_data: Path, tmp_path: Path) -> None:
    lora = {"rank": 2, "alpha": 4, "targets": ["q_b_proj", "experts"]}
    adapt = {"router": "2", "lora": lora}
    train(run_config(base, small_data, tmp_path / "run", adapt, steps=1, save_every=1))
    found = biases(tmp_path / "run/checkpoints/step-1/trained.safetensors")
    assert_same(found, by_metrics(base, tmp_path / "run", (2,), 1))  # the other router does not train
    export(tmp_path / "run", "peft", tmp_path / "peft")
    (stored,) = biases(tmp_path / "peft/adapter_model.safetensors").values()
    assert stored.equal(found[BIAS.format(2)])
    again = run_config(base, small_data, tmp_path / "next", adapt | {"start_from": str(tmp_path / "peft")}, steps=1)
    train(again.model_copy(update={"train": again.train.model_copy(update={"router_bias_rate": 1e-30})}))
    first = biases(tmp_path / "next/checkpoints/step-1/trained.safetensors")
    assert first[BIAS.format(2)].equal(stored)


def test_they_stay_unless_it_is_asked_for(base: Path, small_data: Path, tmp_path: Path) -> None:
    train(run_config(base, small_data, tmp_path / "run", router_bias_rate=0.0, steps=1, save_every=1))
    assert not biases(tmp_path / "run/checkpoints/step-1/trained.safetensors")


@pytest.mark.full
def test_ranks_update_by_the_load_of_all(base: Path, small_data: Path) -> None:
    config = run_config(base, small_data, Path("unused"), accumulate=1)
    two = small.run_config(
        base, small_data, Path("unused"), adapt={"router": "all"}, train=TRAIN | {"accumulate": 1},
        model={"dtype": "fp32"}, parallel={"fsdp": 2, "ep": 2},
    )  # fmt: skip
    alone = taken(config)
    for of_rank in world.run(2, taken, two):
        assert_same(of_rank, alone)


def taken(config: RunConfig) -> dict[str, Tensor]:
    found = steps.take(config, Ranks.join(config.parallel, "cpu"), 3, 4).weights
    return {name: tensor for name, tensor in found.items() if name.endswith("e_score_correction_bias")}


def test_sixteen_bits_do_not_round_updates_away(base: Path, small_data: Path) -> None:
    config = run_config(base, small_data, Path("unused"))
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bf16", "weights": "random"})})
    assert {bias.dtype for bias in build(config, "cpu").router_biases().values()} == {torch.float32}


@pytest.mark.parametrize(
    ("model", "adapt", "message"),
    [
        ("base", {"router": "none", "also": ["norm"]}, "no router trains; set adapt.router"),
        ("small_model", {"router": "all"}, r"the routers of 'mixtral' have no correction bias"),
    ],
)
def test_where_there_is_none_it_is_refused(
    model: str, adapt: dict[str, Any], message: str, small_data: Path, request: pytest.FixtureRequest
) -> None:
    config = run_config(request.getfixturevalue(model), small_data, Path("unused"), adapt)
    with pytest.raises(UserError, match=rf"train\.router_bias_rate: .*{message}"):
        resolve(config, "cpu")
