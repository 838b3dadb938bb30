"""`adapt.start_from`: training begins where an adapter or a delta ended; what does not fit is named before it does."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from moetune.adapters.base import of_another_base
from moetune.adapters.files import open_adapter
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.exporting.export import export
from moetune.models.source import find_model_source
from moetune.training.data.load import load_data
from moetune.training.folder.run_folder import RunFolder
from tests import small
from tests.reference import excite_
from tests.resolved import train, write_quantized_base

LORA = {"rank": 4, "alpha": 8}
TARGETS = {
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
EXPERTS: dict[str, Any] = {"router": "1", "experts": {"layers": "0-1", "ids": [0, 2]}}


def run_of(model: Path, data: Path, output: Path, adapt: dict[str, Any], /, **sections: Any) -> RunConfig:
    """A run in float32 that is evaluated before its first step."""
    run = small.run_file(model, data, output, data={"eval": str(data)}, model={"base": "fp32"})
    for name, section in sections.items():
        run[name] = run.get(name, {}) | section
    return RunConfig.model_validate(run | {"adapt": adapt})


def held_out(model: nn.Module, config: RunConfig, folder: Path) -> float:
    """The mean cross-entropy over every predicted token of the held-out set, from stock code, row by row."""
    assert config.data is not None
    rows = load_data(config.data, AutoTokenizer.from_pretrained(folder), config.train).eval
    total, count = 0.0, 0
    for row in rows:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        total += nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum").item()
        count += int((labels[0, 1:] != -100).sum())
    return total / count


def stock_adapter(model: Path, folder: Path, **settings: Any) -> PeftModel:
    """Trains attention and all experts with stock PEFT for three steps, and saves."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(1)
    made = get_peft_model(plain, LoraConfig(**({"r": 4, "lora_alpha": 8} | TARGETS | settings)))
    excite_(made)
    optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=1e-2)
    ids = torch.randint(3, 2000, (2, 24))
    for _ in range(3):
        made(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    made.save_pretrained(folder)
    return made.eval()


@pytest.fixture(scope="module")
def stock(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PeftModel]:
    folder = tmp_path_factory.mktemp("stock") / "adapter"
    return folder, stock_adapter(small_model, folder)


def test_a_start_names_the_base_that_it_was_trained_on(
    small_model: Path,
    small_data: Path,
    stock: tuple[Path, PeftModel],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another name, or another revision of it, may be other weights; and what it was trained on, other texts."""
    folder = shutil.copytree(stock[0], tmp_path / "adapter")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer.json").write_text('{"added_tokens": [{"content": "<new>"}, {"content": "</s>"}]}')
    settings = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": "org/other"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    turns = [
        {"role": "user", "content": "hi </s>"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "?"},
    ]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}))
    train(run_of(small_model, tmp_path / "chats.jsonl", tmp_path / "run", {"lora": LORA, "start_from": str(folder)}))
    said = capsys.readouterr().err
    assert "names the base 'org/other', and it is read with" in said
    assert f"data.chat_template: {folder / 'chat_template.jinja'} takes that" in said
    assert "1 added token of its tokenizer.json, as <new>, are not in that of model.path" in said
    assert "messages spell special tokens, and become them: </s>" in said
    assert "1 chat ending with a message that nobody answers" in said
    stored, source = open_adapter(folder), find_model_source(str(small_model))
    revised = replace(stored, settings=settings | {"revision": "v2"})
    (note,) = of_another_base(revised, "org/other", source)
    assert "revision 'v2' of its base, and main is read" in note


def test_an_adapter_of_stock_peft_trains_on(
    small_model: Path, small_data: Path, stock: tuple[Path, PeftModel], tmp_path: Path
) -> None:
    folder, made = stock
    adapt = {"lora": LORA, "start_from": str(folder)}
    config = run_of(small_model, small_data, tmp_path / "run", adapt, train={"steps": 6}, optimizer={"lr": 1e-3})
    result = train(config)
    expected = held_out(made, config, small_model)
    assert result.eval_loss_before == pytest.approx(expected, abs=1e-5)
    without = train(run_of(small_model, small_data, tmp_path / "without", {"lora": LORA}, train={"steps": 1}))
    assert without.eval_loss_before is not None
    assert abs(without.eval_loss_before - expected) > 1e-2
    assert result.eval_loss_after < result.eval_loss_before


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("adapt", "format_"),
    [
        ({"router": "all", "lora": LORA | {"ids": [1, 3], "gate_up": "split"}}, "peft"),
        (EXPERTS, "delta"),
        ({"also": ["*"]}, "delta"),
        ({"router": "all"}, "delta"),
    ],
)
def test_what_a_run_exported_trains_on(
    adapt: dict[str, Any], format_: Any, small_model: Path, small_data: Path, tmp_path: Path
) -> None:
    first = train(run_of(small_model, small_data, tmp_path / "first", adapt))
    export(tmp_path / "first", format_, tmp_path / "out")
    begun = adapt | {"start_from": str(tmp_path / "out")}
    second = train(run_of(small_model, small_data, tmp_path / "second", begun, train={"steps": 4}))
    assert second.eval_loss_before == pytest.approx(first.eval_loss_after, abs=1e-6)
    assert abs(first.eval_loss_after - first.eval_loss_before) > 1e-3
    assert second.eval_loss_after != second.eval_loss_before


@pytest.mark.full
def test_a_delta_on_the_packed_base_that_was_packed_from_its_own(
    small_model: Path, small_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Router values are the delta's; what else trains begins as it would without, and stderr says so."""
    train(run_of(small_model, small_data, tmp_path / "first", {"router": "1"}))
    export(tmp_path / "first", "delta", tmp_path / "out")
    write_quantized_base(str(small_model), tmp_path / "packed", "nf4", True)
    adapt = {"router": "all", "lora": LORA, "start_from": str(tmp_path / "out")}
    settings = {"base": "nf4"}
    capsys.readouterr()
    train(
        run_of(
            tmp_path / "packed", small_data, tmp_path / "second", adapt, model=settings,
            optimizer={"lr": 1e-12}, train={"steps": 1},
        )
    )  # fmt: skip
    said = capsys.readouterr().err
    assert "not in the delta, so it starts from the base's values: model.layers.0.mlp.gate.weight\n" in said
    assert "a delta holds no LoRA; its factors are newly initialized" in said
    begun = load_file(tmp_path / "second" / "checkpoints" / "step-1" / "trained.safetensors")
    ended = load_file(tmp_path / "first" / "checkpoints" / "step-3" / "trained.safetensors")
    name = "model.layers.1.mlp.gate.weight"
    torch.testing.assert_close(begun[name], ended[name], rtol=0, atol=1e-9)
    base = load_file(small_model / "model.safetensors")["model.layers.0.block_sparse_moe.gate.weight"]
    torch.testing.assert_close(begun["model.layers.0.mlp.gate.weight"], base, rtol=0, atol=1e-9)
    assert RunFolder(tmp_path / "second").base() == RunFolder(tmp_path / "first").base()


def refused(config: RunConfig, message: str) -> None:
    """Before a weight is loaded, and with nothing written."""
    with pytest.raises(UserError, match=message):
        train(config)
    assert not Path(str(config.output)).exists()


@pytest.fixture(scope="module")
def delta(small_model: Path, small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `EXPERTS` trained."""
    folder = tmp_path_factory.mktemp("delta")
    train(run_of(small_model, small_data, folder / "run", EXPERTS))
    export(folder / "run", "delta", folder / "delta")
    return folder / "delta"


@pytest.mark.parametrize(
    ("kind", "adapt", "message"),
    [
        ("adapter", {"lora": LORA | {"rank": 2, "alpha": 4}}, r"q_proj: rank 4, and adapt\.lora asks for 2"),
        ("delta", {"router": "all"}, r"experts\.0\.w1\.weight is in the delta, but does not train"),
    ],
)
def test_what_does_not_fit_is_refused_before_weights_are_loaded(
    kind: str,
    adapt: dict[str, Any],
    message: str,
    stock: tuple[Path, PeftModel],
    delta: Path,
    small_model: Path,
    small_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moetune.adapt.build.read_published", lambda *_: pytest.fail("weights were loaded"))
    start = stock[0] if kind == "adapter" else delta
    refused(run_of(small_model, small_data, tmp_path / "run", adapt | {"start_from": str(start)}), message)


def test_a_delta_of_another_base_is_refused(small_data: Path, delta: Path, tmp_path: Path) -> None:
    adapt = EXPERTS | {"start_from": str(delta)}
    wider = small.write_model(tmp_path / "wider", intermediate_size=64)
    refused(run_of(wider, small_data, tmp_path / "run", adapt), r"made for another base than '.*wider': .* is F32 \[")
    other = small.write_model(tmp_path / "other", initializer_range=0.03)
    refused(
        run_of(other, small_data, tmp_path / "run", adapt),
        r"adapt\.start_from: the delta in .* another base than '.*other': the same tensors with other values",
    )
    random = run_of(other, small_data, tmp_path / "run", adapt, model={"weights": "random"})
    refused(random, r"belongs to a checkpoint, and model\.weights is random")


def test_a_part_of_an_expert_is_refused(small_model: Path, small_data: Path, delta: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(delta, tmp_path / "delta"))
    tensors = load_file(broken / "delta.safetensors")
    del tensors["model.layers.0.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, broken / "delta.safetensors")
    config = run_of(small_model, small_data, tmp_path / "run", EXPERTS | {"start_from": str(broken)})
    refused(config, r"delta\.safetensors' was changed after it was written")
    manifest = json.loads((broken / "manifest.json").read_text())
    from moetune.models.hub.fingerprint import digest

    (broken / "manifest.json").write_text(json.dumps(manifest | {"sha256": digest(broken / "delta.safetensors")}))
    refused(config, r"trained\.2\.gate_up\.weight also needs .*experts\.2\.w3\.weight, which is not in the delta")


def test_a_frozen_router_with_another_value_is_named_with_its_key(
    small_model: Path, small_data: Path, tmp_path: Path
) -> None:
    """Known only once the weights are there."""
    train(run_of(small_model, small_data, tmp_path / "first", {"router": "all", "lora": LORA}))
    export(tmp_path / "first", "peft", tmp_path / "out")
    config = run_of(small_model, small_data, tmp_path / "run", {"lora": LORA, "start_from": str(tmp_path / "out")})
    message = r"adapt\.start_from: the adapter in .*\n  model\.layers\.0\.mlp\.gate\.weight: is in the adapter; it is "
    refused(config, message + r"frozen here, with another value; set adapt\.router so that it trains")


def test_what_is_neither_is_named(small_model: Path, small_data: Path, delta: Path, tmp_path: Path) -> None:
    def starting(folder: Path) -> RunConfig:
        return run_of(small_model, small_data, tmp_path / "run", EXPERTS | {"start_from": str(folder)})

    refused(starting(tmp_path / "none"), r"adapt\.start_from: folder '.*none' does not exist")
    (tmp_path / "nothing").mkdir()
    refused(starting(tmp_path / "nothing"), r"holds no PEFT adapter .* and no delta")
    (tmp_path / "nothing" / "checkpoint-500").mkdir()
    (tmp_path / "nothing" / "checkpoint-500" / "adapter_model.safetensors").touch()
    refused(starting(tmp_path / "nothing"), r"holds no PEFT adapter .*; there is one in checkpoint-500")
    (tmp_path / "nothing" / "trainer_state.json").touch()
    refused(
        starting(tmp_path / "nothing"), r"holds no PEFT adapter .*: trainer_state\.json is of a trainer's checkpoint"
    )
    (tmp_path / "nothing" / "config.json").write_text('{"model_type": "moetune-adapted"}')
    refused(starting(tmp_path / "nothing"), r"what a trainer saved of the model of moetune\.build; resume it there")
    refused(starting(small_model), r"is a whole checkpoint; give it as model\.path")
    run = delta.parent / "run"
    refused(starting(run), rf"is a run; .* moetune export {run} --format peft\|delta --out DIR, and give DIR")
    refused(starting(run / "checkpoints" / "step-3"), rf"is a checkpoint of a run; .* moetune export {run} --format")
    export(delta.parent / "run", "merged", tmp_path / "merged")
    refused(starting(tmp_path / "merged"), r"is a whole checkpoint; give it as model\.path")
    (tmp_path / "empty").mkdir()
    shutil.copy(delta / "delta.safetensors", tmp_path / "empty")
    refused(starting(tmp_path / "empty"), r"is not a delta: its manifest\.json cannot be read")


@pytest.mark.full
def test_a_resumed_run_needs_no_start(
    small_model: Path, small_data: Path, stock: tuple[Path, PeftModel], tmp_path: Path
) -> None:
    """It goes on from its checkpoint, bit for bit as one that was not interrupted, although the folder is gone."""
    folder = Path(shutil.copytree(stock[0], tmp_path / "adapter"))
    adapt = {"lora": LORA, "start_from": str(folder)}
    whole, part = (run_of(small_model, small_data, tmp_path / name, adapt, train={"steps": 4}) for name in "ab")
    train(whole)
    train(part.model_copy(update={"train": part.train.model_copy(update={"steps": 2})}))
    other = part.model_copy(update={"adapt": part.adapt.model_copy(update={"start_from": None})})
    with pytest.raises(UserError, match=r"adapt\.start_from: '.*adapter' before, None now"):
        train(other, resume="auto")
    shutil.rmtree(folder)
    train(part, resume="auto")
    found, expected = (
        load_file(tmp_path / name / "checkpoints" / "step-4" / "trained.safetensors") for name in ("b", "a")
    )
    assert all(found[name].equal(expected[name]) for name in expected)
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-2")
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-4")
    with pytest.raises(UserError, match=r"adapt\.start_from: folder '.*adapter' does not exist"):
        train(part, resume="auto")  # without a checkpoint it begins again


def test_overwriting_what_it_starts_from_is_refused(small_model: Path, small_data: Path, tmp_path: Path) -> None:
    config = run_of(small_model, small_data, tmp_path / "run", EXPERTS)
    train(config)
    export(tmp_path / "run", "delta", tmp_path / "run" / "delta")
    again = config.model_copy(
        update={"adapt": config.adapt.model_copy(update={"start_from": str(tmp_path / "run" / "delta")})}
    )
    with pytest.raises(UserError, match=r"is in output .*, which --overwrite empties"):
        train(again, overwrite=True)
    assert (tmp_path / "run" / "delta" / "delta.safetensors").is_file()
