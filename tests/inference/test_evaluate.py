"""A run, its exports and its base in use: the same number and the same text from each."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.exporting.export import export
from moetune.inference.evaluate import Evaluation, _is_held_out, evaluate, rows_of
from moetune.inference.generate import generate
from moetune.inference.opened import find, open_model
from tests import small
from tests.resolved import train

TEXT = "a router sends every"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def run(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A run of two steps on that base, trained once for each base and way to adapt."""
    folder, made = tmp_path_factory.mktemp("inference"), dict[str, Path]()
    data = small.write_data(folder / "data.jsonl")
    (folder / "template.jinja").write_text(TEMPLATE)

    def trained(adapt: str, base: str) -> Path:
        out = folder / f"{adapt}-{base}"
        if out.name not in made:
            file = small.run_file(
                small_model, data, out, adapt, model={"base": base}, train={"steps": 2, "eval_every": 2},
                data={"eval": str(data), "chat_template": str(folder / "template.jinja")},
            )  # fmt: skip
            if "lora" in file["adapt"]:
                file["adapt"]["lora"]["targets"].append("lm_head")
            train(RunConfig.model_validate(file), device="cpu")
            made[out.name] = out
        return made[out.name]

    return trained


def loss_of(what: Path, data: Path | None = None, **options: Any) -> Evaluation:
    return evaluate(open_model(str(what), device="cpu"), data and str(data), **options)


def test_a_run_evaluates_as_training_did(run: Callable[..., Path]) -> None:
    folder = run("lora", "nf4")
    found, last = loss_of(folder), small.read_metrics(folder)[-1]
    assert (found.kind, found.records, found.tokens) == ("run", len(small.DATA), last["eval_tokens"])
    assert found.loss == pytest.approx(last["eval_loss"], rel=1e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("base", "tolerance"), [("fp32", 1e-5), ("nf4", 2e-2)])
def test_run_merged_and_adapter_agree(base: str, tolerance: float, run: Callable[..., Path], tmp_path: Path) -> None:
    folder = run("lora", base)
    export(folder, "merged", tmp_path / "merged")
    export(folder, "peft", tmp_path / "adapter")
    data = folder.parent / "data.jsonl"
    trained, merged, adapter = (
        loss_of(where, data, sequence_length=64) for where in (folder, tmp_path / "merged", tmp_path / "adapter")
    )
    assert (trained.kind, merged.kind, adapter.kind) == ("run", "checkpoint", "adapter")
    assert merged.loss == pytest.approx(trained.loss, rel=tolerance)
    assert adapter.loss == pytest.approx(merged.loss, rel=1e-5)
    assert (tmp_path / "merged" / "chat_template.jinja").read_text() == TEMPLATE


@pytest.mark.full
def test_a_run_writes_what_its_merged_checkpoint_writes(run: Callable[..., Path], tmp_path: Path) -> None:
    folder = run("lora", "fp32")
    merged = export(folder, "merged", tmp_path / "merged").out
    opened = open_model(str(folder), device="cpu")
    text = generate(opened, TEXT, max_new_tokens=12)
    stock = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    ids = opened.tokenizer(TEXT, return_tensors="pt").input_ids
    expected = stock.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert text == opened.tokenizer.decode(expected, skip_special_tokens=True)
    asked = [{"role": "user", "content": TEXT}]
    drawn = [generate(opened, asked, max_new_tokens=8, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    opened.tokenizer.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        generate(opened, asked)


def test_no_more_is_written_than_there_are_positions(run: Callable[..., Path]) -> None:
    opened = open_model(str(run("lora", "fp32")), device="cpu")
    settings, asked = opened.settings.get_text_config(), len(opened.tokenizer(TEXT)["input_ids"])
    three = generate(opened, TEXT, max_new_tokens=3)
    settings.max_position_embeddings = asked + 3
    assert generate(opened, TEXT, max_new_tokens=10**9) == three
    settings.max_position_embeddings = asked
    with pytest.raises(UserError, match=f"the prompt has {asked} tokens, and the model has positions for {asked}"):
        generate(opened, TEXT)


def test_a_base_can_stay_packed(small_model: Path, small_data: Path) -> None:
    plain = loss_of(small_model, small_data)
    packed = evaluate(open_model(str(small_model), base="nf4", device="cpu"), str(small_data))
    assert packed.kind == "packed"
    assert packed.tokens == plain.tokens
    assert 0 < abs(packed.loss / plain.loss - 1) < 0.05


def test_records_that_are_too_long(
    run: Callable[..., Path],
    small_model: Path,
    tmp_path: Path,
    moetune: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The remedy is the command's own option; what a run's settings leave out or cut is said."""
    data = small.write_data(tmp_path / "long.jsonl", [{"prompt": "a router " * 40, "completion": "b"}, *small.DATA])
    ended = moetune("eval", small_model, "--data", data, "--sequence-length", "32")
    assert ended.code == 2
    assert "raise --sequence-length to" in ended.err
    assert not any(key in ended.err for key in ("train.", "data.")), ended.err
    capsys.readouterr()
    opened = find(str(run("lora", "nf4")), device="cpu")
    assert opened.config is not None
    drops = replace(opened, config=opened.config.but(data={"too_long": "drop"}))
    dropped = 1 + len(small.DATA) - len(rows_of(drops, str(data), sequence_length=32)[0])
    assert dropped > 0
    assert f"{dropped} records were left out and 0 cut" in capsys.readouterr().err


@pytest.mark.full
def test_a_checkpoint_in_float16_that_is_computed_in_bfloat16(
    small_model: Path, small_data: Path, tmp_path: Path, moetune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(small_model, tmp_path / "half")
    file = tmp_path / "half" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "float16"}))
    scored = ("score", tmp_path / "half", "--data", small_data, "--out", tmp_path / "scores.json")
    evaluated = ("eval", tmp_path / "half", "--data", small_data)
    assert not any("float16" in moetune(*command).err for command in (scored, evaluated))  # computed in float32
    for module in ("inference.opened", "run.resolve"):
        monkeypatch.setattr(f"moetune.{module}.dtype_on", lambda _: "bf16")  # as on a GPU
    for command in ((*scored, "--overwrite"), evaluated):
        ended = moetune(*command)
        assert (ended.code, ended.err.count("is in float16 and computed in bfloat16")) == (0, 1), ended.err


def test_the_commands(run: Callable[..., Path], moetune: Callable[..., Any], tmp_path: Path) -> None:
    folder = run("lora", "nf4")
    found = json.loads(moetune("eval", folder, "--json").out)
    assert (found["schema"], found["kind"]) == (1, "run")
    assert found["perplexity"] == pytest.approx(2.718281828459045 ** found["loss"])
    assert "held-out loss" in moetune("eval", folder).out
    written = json.loads(moetune("generate", folder, "--prompt", TEXT, "--max-new-tokens", "4", "--json").out)
    assert moetune("generate", folder, "--prompt", TEXT, "--max-new-tokens", "4").out.strip() == written["text"].strip()
    ended = moetune("eval", folder, "--base", "nf4")
    assert (ended.code, "leave --base out" in ended.err) == (2, True)


def test_the_page_of_a_run(run: Callable[..., Path], moetune: Callable[..., Any], tmp_path: Path) -> None:
    from tests.report.test_page import Page

    folder = run("lora", "nf4")
    assert moetune("report", folder, "--no-timeline", "--out", tmp_path / "run.html").code == 0
    html = (tmp_path / "run.html").read_text()
    page = Page(html)
    losses = [line["eval_loss"] for line in small.read_metrics(folder) if "eval_loss" in line]
    assert f"2 of 2 steps: held-out loss {losses[0]:.4f} → {losses[-1]:.4f}" in page.text
    assert (folder / "run.yaml").read_text() in page.text
    assert html.count("<svg") == 2
    for outside in ("src=", "url(http", "@import", "<script"):
        assert outside not in html
    assert moetune("report", tmp_path / "gone").code == 2


def test_whether_a_run_trained_on_a_split(tmp_path: Path) -> None:
    folder, file = tmp_path / "set", small.write_data(tmp_path / "held.jsonl")
    folder.mkdir()
    small.write_data(folder / "train.jsonl")
    run = RunConfig.model_validate(
        {"model": {"path": "x"}, "adapt": {}, "data": {"train": str(folder), "eval": [str(file), f"{folder}:test"]}}
    )
    asked = {
        str(folder): False, f"{folder}:train": False, f"{folder}:test": True, f"{folder}:dev": None, str(file): True,
    }  # fmt: skip
    assert {data: _is_held_out(run, data) for data in asked} == asked
    other = run.but(data={"split": "test"})
    assert [_is_held_out(other, data) for data in asked] == [None, None, False, None, True]
