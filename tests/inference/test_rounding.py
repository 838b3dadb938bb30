"""`quantize --measure` finds the layer that suffers from rounding, and proposes to leave it in 16 bits."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from moetune.cli.main import app
from moetune.cli.quantize import _left_by, _shown
from moetune.config.schema import RunConfig
from moetune.errors import DoesNotFit
from moetune.experts.bank import ExpertBank
from moetune.inference.evaluate import evaluate, mean_loss, rows_of
from moetune.inference.opened import find_in_16_bits
from moetune.inference.rounding import PartCost, _matrices, _round_, base_of, left_in_16_bits, measure
from moetune.models.catalog import find_model
from moetune.planning.predict import predict
from moetune.training.data.load import pad_token_id
from tests import small
from tests.adapt.weights.test_base_by_layer import rounded
from tests.resolved import write_quantized_base


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write_data(tmp_path_factory.mktemp("data") / "rows.jsonl", small.DATA[:6])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each block of 64 weights of gate_up in layer 0 has an outlier, which meets a zero: only rounding shows it."""
    entry = find_model("tiny-mixtral")
    assert entry is not None
    assert entry.folder is not None
    folder = shutil.copytree(entry.folder, tmp_path_factory.mktemp("models") / "planted")
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    plain.model.layers, plain.config.num_hidden_layers = plain.model.layers[:2], 2
    with torch.no_grad():
        layer = plain.model.layers[0]
        layer.post_attention_layernorm.weight[::64] = 0
        layer.mlp.experts.gate_up_proj[:, :, ::64] = 20
    plain.save_pretrained(folder)
    return Path(folder)


def loss_by_hand(model: Path, data: Path, folder: Path, layer: int, part: str, storage: str) -> float:
    """The loss of the checkpoint with one part of one layer rounded, computed by transformers."""
    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    module = plain.model.layers[layer].mlp.experts if part == "experts" else plain.model.layers[layer].self_attn
    with torch.no_grad():
        for parameter in module.parameters():
            if min(parameter.shape[-2:]) >= 64:  # smaller layers stay as they are
                parameter.copy_(rounded(parameter, storage))
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    plain.save_pretrained(folder)
    return evaluate(str(folder), str(data)).loss


@pytest.mark.full
@pytest.mark.one_in(2)
@pytest.mark.parametrize("storage", ["nf4", "mxfp4"])
def test_each_cost_is_that_of_a_model_rounded_by_hand(storage: Any, model: Path, data: Path, tmp_path: Path) -> None:
    found = measure(str(model), str(data), storage, budget=10**9)
    plain = evaluate(str(model), str(data))
    assert (found.loss, found.records, found.tokens) == (pytest.approx(plain.loss), plain.records, plain.tokens)
    parts = ("experts",) if storage == "mxfp4" else ("attention", "experts")
    assert [(one.layer, one.part) for one in found.parts] == [(layer, part) for layer in range(2) for part in parts]
    for one in found.parts[: len(parts)]:
        folder = tmp_path / f"{one.layer}-{one.part}"
        folder.mkdir()
        expected = loss_by_hand(model, data, folder, one.layer, one.part, storage) - plain.loss
        assert one.cost == pytest.approx(expected, abs=2e-6)


def test_the_planted_layer_is_found_and_left_in_16_bits(model: Path, data: Path, tmp_path: Path) -> None:
    """In exactly its bytes; and the loss is that of a base that is written so."""
    free = measure(str(model), str(data))
    worst = max(free.parts, key=lambda one: one.cost)
    assert (worst.layer, worst.part) == (0, "experts")
    assert worst.cost > 20 * max(one.cost for one in free.parts if one is not worst)
    assert (free.base, free.base_loss) == (None, None)
    options = ("--measure", str(data), "--budget", f"{worst.bytes}B", "--json")
    ended = CliRunner().invoke(app, ["quantize", str(model), *options])
    assert ended.exit_code == 0, ended.output
    answer = json.loads(ended.stdout)
    assert answer["base"] == {"default": "nf4", "layers": {"0": {"experts": "bf16"}}}
    assert answer["base_bytes"] == worst.bytes
    assert answer["rounded_loss"] == pytest.approx(free.rounded_loss, rel=1e-6)
    written = [
        write_quantized_base(str(model), tmp_path / name, base, True) and tmp_path / name
        for name, base in (("mixed", answer["base"]), ("nf4", "nf4"))
    ]
    for folder, loss in zip(written, (answer["base_loss"], answer["rounded_loss"]), strict=True):
        assert evaluate(str(folder), str(data)).loss == pytest.approx(loss, abs=2e-6)
    sizes = [sum(file.stat().st_size for file in folder.glob("*experts.safetensors")) for folder in written]
    assert sizes[0] - sizes[1] == pytest.approx(worst.bytes, abs=1024)  # names in the headers of the files
    text = str(_shown(replace(free, **{key: answer[key] for key in ("base", "base_bytes", "base_loss")}))[-1])
    assert yaml.safe_load(text) == {"model": {"base": answer["base"]}}


@pytest.mark.full
def test_a_budget_is_what_a_run_leaves_free(model: Path, data: Path, tmp_path: Path) -> None:
    """With all of the base rounded, whatever its file says of it; and the run then fits with the map."""
    run: dict[str, Any] = {"model": {"path": str(model), "base": "bf16"}, "adapt": {"router": "all"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    words = ["quantize", str(model), "--measure", str(data), "--json", "--budget", str(tmp_path / "run.yaml")]
    ended = CliRunner().invoke(app, words)
    assert "names no GPU; set hardware.gpu there" in str(ended.exception)
    rounded = predict(RunConfig.model_validate(run | {"model": {"path": str(model)}}), gpu="24GiB")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run | {"hardware": {"gpu": "24GiB"}}))
    assert _left_by(words[-1], "nf4") == rounded.least_headroom
    answer = json.loads(CliRunner().invoke(app, words).stdout)
    assert answer["base"]["layers"]["0"] in ("bf16", {"experts": "bf16"})
    assert 0 < answer["base_bytes"] <= rounded.least_headroom
    mixed = predict(
        RunConfig.model_validate(run | {"model": {"path": str(model), "base": answer["base"]}}), gpu="24GiB"
    )
    assert mixed.least_headroom >= 0
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run | {"hardware": {"gpu": "500MiB"}}))
    with pytest.raises(DoesNotFit, match=r"--budget: .*run\.yaml' leaves nothing of .* free"):
        _left_by(words[-1], "nf4")


@pytest.mark.full
def test_experts_on_the_host_are_rounded_there(model: Path, data: Path) -> None:
    """Where a GPU does not hold the model in 16 bits."""
    found = find_in_16_bits(str(model), "cpu", on_host=True)
    assert found.run is not None
    rows, _ = rows_of(found, str(data))
    for stacks in _matrices(found.run, found.model, "nf4").values():
        for stack in stacks:
            _round_(stack, "nf4", True, torch.device("cpu"))
    bank = next(module for module in found.model.modules() if isinstance(module, ExpertBank))
    assert bank.gate_up.on_host
    loss, _ = mean_loss(found.model, rows, pad_token_id(found.tokenizer))
    assert loss == pytest.approx(measure(str(model), str(data)).rounded_loss, abs=2e-6)


def test_what_a_budget_leaves() -> None:
    parts = [
        *(PartCost(0, "experts", 0.9, 100), PartCost(0, "attention", 0.1, 10)),
        *(PartCost(1, "experts", 0.2, 100), PartCost(1, "attention", -0.1, 10), PartCost(2, "experts", 0.0, 1)),
    ]

    def base(budget: int) -> Any:
        return base_of(left_in_16_bits(parts, budget), parts, "nf4")

    assert base(9) == "nf4"
    assert base(109)["layers"] == {"0": {"attention": "bf16"}}  # most nats a byte, though the experts cost more
    assert base(110)["layers"] == {"0": "bf16"}
    assert base(1000) == {"default": "nf4", "layers": {"0": "bf16", "1": {"experts": "bf16"}}}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--measure {} --out x", "--out is for writing; leave it out with --measure"),
        ("--budget 1GiB --out x", "--budget needs --measure DATA"),
        ("--measure {} --budget 1", "--budget '1' is no size above zero"),
        ("--measure {} --base {{default:nf4}}", "--measure rounds to one format; give its name"),
        ("--measure gone.jsonl", "no such file: 'gone.jsonl'"),
        ("--out x --base {{layers:{{7:bf16}}}}", "model.base.layers: 7, and the model has the layers 0-1"),
        ("--out x --base {{layers:{{0:bf17}}}}", "model.base.layers.0: 'bf17' is not valid"),
    ],
)
def test_what_is_refused(options: str, problem: str, model: Path, data: Path) -> None:
    words = [word.replace(":", ": ") if word.startswith("{") else word for word in options.format(data).split()]
    ended = CliRunner().invoke(app, ["quantize", str(model), *words])
    assert problem in str(ended.exception), ended.output


def test_of_a_quantized_base_the_checkpoint_is_measured(model: Path, data: Path, tmp_path: Path) -> None:
    write_quantized_base(str(model), tmp_path / "packed", "nf4", True)
    ended = CliRunner().invoke(app, ["quantize", str(tmp_path / "packed"), "--measure", str(data)])
    assert "is quantized already; give the checkpoint" in str(ended.exception)
