"""The model and the data that moetune ships for trying it out, and the scripts that made them."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from moetune.config.schema import RunConfig
from moetune.inference.evaluate import evaluate
from moetune.inference.opened import open_model
from moetune.routing.score import score, to_score
from moetune.run.resolve import resolve
from tests import small

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "moetune/models/catalog/tiny-mixtral"
DATA = ROOT / "moetune/models/catalog/data/unicode-names"


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """Held-out text of both domains it was trained on, taken from the running Python, in pieces of 700 characters."""
    files = {}
    for name, domain in zip(("prose", "code"), load_script("make_tiny_mixtral").domains(), strict=True):
        text = "\n".join(domain.held_out)
        files[name] = tmp_path_factory.mktemp(name) / "held_out.jsonl"
        small.write_data(files[name], [{"text": text[at : at + 700]} for at in range(0, len(text), 700)])
    return files


def test_it_is_small():
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 8_000_000


def test_the_file_holds_the_tensors_of_a_hub_mixtral():
    with safe_open(MODEL / "model.safetensors", "pt") as file:
        tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        assert {tensor.get_dtype() for tensor in tensors.values()} == {"BF16"}
    moe = "model.layers.{}.block_sparse_moe"
    expected = {
        f"{moe.format(layer)}.{part}": shape
        for layer in range(4)
        for part, shape in {
            "gate.weight": [8, 128],
            **{f"experts.{expert}.{w}.weight": [256, 128] for expert in range(8) for w in ("w1", "w3")},
            **{f"experts.{expert}.w2.weight": [128, 256] for expert in range(8)},
        }.items()
    }
    found = {name: tensor.get_shape() for name, tensor in tensors.items() if "block_sparse_moe" in name}
    assert found == expected


@pytest.mark.parametrize("text", ["def f(x):\n    return x  # ½ naïve\n", " two  spaces ", "漢字 🙂", ""])
def test_the_tokenizer_gives_back_what_it_got(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_special_tokens_are_the_ones_the_model_was_trained_with(tokenizer):
    special = {token: tokenizer.convert_tokens_to_ids(token) for token in ("<unk>", "<s>", "</s>", "<pad>")}
    assert special == {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3}
    assert len(tokenizer) == 2048


def test_the_chat_template_marks_only_what_the_assistant_says(tokenizer):
    chat = [
        {"role": "user", "content": "What is a tuple?"},
        {"role": "assistant", "content": "An immutable sequence."},
        {"role": "user", "content": "And a list?"},
        {"role": "assistant", "content": "A mutable one."},
    ]
    tokens = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    said = [token for token, mask in zip(tokens["input_ids"], tokens["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(tokens["input_ids"]) == (
        "<s>[INST]What is a tuple?[/INST]An immutable sequence.</s>[INST]And a list?[/INST]A mutable one.</s>"
    )
    assert tokenizer.decode(said) == "An immutable sequence.</s>A mutable one.</s>"


@pytest.mark.full
@pytest.mark.parametrize(("domain", "ceiling"), [("prose", 4.3), ("code", 4.1)])
def test_it_has_learned_both_domains(held_out, domain, ceiling):
    """The ceilings leave room for other versions of Python, whose text differs a little."""
    loss = evaluate(open_model("tiny-mixtral", device="cpu", dtype="fp32"), str(held_out[domain]), 512).loss
    assert loss < ceiling < math.log(2048) - 3


@pytest.mark.full
def test_its_experts_have_specialized(held_out):
    run = {"model": {"path": "tiny-mixtral", "base": "fp32", "dtype": "fp32"}, "adapt": {"router": "all"}}
    resolved = resolve(to_score(RunConfig.model_validate(run)), "cpu")
    prose_LE, code_LE = (
        torch.tensor([layer.loss.share for layer in score(resolved, [str(file)], device="cpu").layers.values()])
        for file in held_out.values()
    )
    assert (
        0.5 * (prose_LE - code_LE).abs().sum(1).mean() > 0.5
    )  # total variation: 0 for equal use, 1 for none in common
    assert ((prose_LE + code_LE) / 2).min() > 0.01


def test_the_data_are_what_the_script_writes():
    written = load_script("make_demo_data").files()
    assert {file.name: file.read_bytes() for file in DATA.glob("*.jsonl")} == written


def test_the_held_out_characters_are_not_in_the_training_data():
    texts = load_script("make_demo_data").documents()
    code_points = {name: {line.split()[0] for text in texts[name] for line in text.split("\n")} for name in texts}
    assert len(code_points["heldout"]) > 900
    assert not code_points["train"] & code_points["heldout"]
