"""Batches of prompts with a static cache generate, for every type, what each prompt generates without a cache."""

import json
import math
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from moetune.errors import UserError
from moetune.inference import generate
from moetune.inference.completions import _batches
from moetune.inference.memory import predict_generate
from moetune.inference.opened import Opened, find, open_model
from moetune.training.data.chats import chat_template
from tests import toys
from tests.chat_templates import NAMES, of_trl, tokenizer_with
from tests.reference import build_toy

WITH_ATTENTION: dict[str, dict[str, Any]] = {
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
}
"""A cache of linear attention alone has no length, which transformers asks for."""
NEW, LENGTHS = 6, (5, 20, 9, 9)


class Tokenizer:
    """Shows tokens as numbers, and has no end of text."""

    eos_token_id = eos_token = chat_template = None
    pad_token_id = 0
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return str(ids)


class OpenedToy(Opened):
    @property
    def tokenizer(self) -> Any:
        return Tokenizer()


def without_cache(model: Any, ids: list[int]) -> Iterator[int]:
    for _ in range(NEW):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
        ids = [*ids, int(logits[0, -1].argmax())]
        yield ids[-1]


@pytest.mark.one_in(56)
@pytest.mark.parametrize("model_type", ["gpt_oss", "deepseek_v4", *toys.expert_model_types()])
def test_batches_change_nothing(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "pad_token_id", lambda tokenizer: tokenizer.pad_token_id)
    monkeypatch.setattr(generate, "stop_ids", lambda *_: [])
    config = toys.toy_config(model_type, **WITH_ATTENTION.get(model_type, {}))
    sections: dict[str, Any] = {
        "model": {"attention": "auto", "base": "fp32"},
        "data": {"train": "x", "packing": False},
    }
    adapted = build_toy(config, tmp_path, {"router": "all"}, **sections)
    opened = OpenedToy(name="toy", kind="checkpoint", resolved=adapted.run.model, load=lambda: adapted.model)
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, toys.VOCAB, (length,), generator=draw).tolist() for length in LENGTHS]
    texts = dict[int, str]()
    for numbers in _batches(opened, rows, 3):
        found = generate.continued(opened, [rows[number] for number in numbers], max_new_tokens=NEW)
        texts.update(zip(numbers, found, strict=True))
    assert [texts[number] for number in range(4)] == [str(list(without_cache(opened.model, row))) for row in rows]


def test_a_checkpoint_whose_training_packs_documents_generates(small_model: Path, tmp_path: Path) -> None:
    """The attention of packed documents with sinks, which gpt-oss trains with on a CPU too, has no cache of keys."""
    shutil.copytree(
        small_model, tmp_path, ignore=shutil.ignore_patterns("*.safetensors", "config.json"), dirs_exist_ok=True
    )
    vocabulary = json.loads((small_model / "config.json").read_text())["vocab_size"]
    toys.toy_model("gpt_oss", vocab_size=vocabulary).save_pretrained(tmp_path)
    assert generate.generate(open_model(str(tmp_path), device="cpu"), "a router", max_new_tokens=4)


PROMPT = "a router"


def test_settings_of_generation_config_that_change_the_text(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each does what it does in transformers, or is named; and it is predicted."""
    shutil.copytree(small_model, tmp_path, dirs_exist_ok=True)

    def text(**settings: Any) -> str:
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
        return generate.generate(open_model(str(tmp_path), device="cpu"), PROMPT, max_new_tokens=9)

    whole = text(do_sample=True, temperature=0.6, max_length=20, length_penalty=1.0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    stopped = text(stop_strings=[whole[4:6]])  # ends with the token that completes it
    assert whole.startswith(stopped)
    assert whole.index(whole[4:6]) + 2 <= len(stopped) < len(whole)
    assert tokenizer(text(suppress_tokens=ids), add_special_tokens=False)["input_ids"][0] not in ids
    assert not text(begin_suppress_tokens=ids[:1]).startswith(tokenizer.decode(ids[:1]))
    assert not capsys.readouterr().err
    assert text(presence_penalty=1.5, num_beams=4) == whole
    assert "num_beams, presence_penalty: not applied" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"suppress_tokens\.0: -1"):
        text(suppress_tokens=[-1])
    with pytest.raises(UserError, match=r"eos_token_id .*: '</s>' is no id of a token; .*</s> has 2"):
        text(eos_token_id="</s>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"stop_strings": ["a"], "suppress_tokens": ids}))
    assert predict_generate(find(str(tmp_path), device="cpu"), 3, 4).fullest.peak_allocated


@pytest.mark.parametrize("wrong", [{"temperature": math.nan}, {"temperature": -1.0}, {"max_new_tokens": 0}])
def test_a_temperature_or_length_without_meaning_is_refused(wrong: dict[str, Any], small_model: Path) -> None:
    with pytest.raises(UserError, match=r"temperature=(nan|-1\.0|0\.0), max_new_tokens=(128|0): give"):
        generate.generate(find(str(small_model), device="cpu"), PROMPT, **wrong)


def test_a_prompt_that_spells_its_own_beginning(small_model: Path) -> None:
    """As a rendered chat does: no second beginning-of-sequence token, and none that ends it."""
    opened = find(str(small_model), device="cpu")
    assert generate.token_ids(opened, f"<s>{PROMPT}") == generate.token_ids(opened, PROMPT)
    assert generate.token_ids(opened, PROMPT)[:2] != [1, 1]


def test_generation_ends_at_the_tokens_of_generation_config_too(small_model: Path, tmp_path: Path) -> None:
    shutil.copytree(small_model, tmp_path, dirs_exist_ok=True)
    whole = generate.generate(open_model(str(tmp_path), device="cpu"), "a router", max_new_tokens=9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(6, 512)]}))
    opened = open_model(str(tmp_path), device="cpu")
    for _ in range(2):  # a dialogue generates again with the same model
        text = generate.generate(opened, "a router", max_new_tokens=9)
        assert whole.startswith(text)
        assert len(text) < len(whole)


TEMPLATES = [name for name in NAMES if "training" not in name and name not in ("idefics3", "llava_next", "smolvlm")]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.one_in(7)
def test_thoughts_that_special_tokens_part_from_answers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As the template writes the last turn, the text has both; the next turn's prompt is what the template makes of
    them. What it does not write so is said."""
    tokenizer = tokenizer_with(of_trl(name))
    asked = [{"role": "user", "content": "hi?"}]
    answer = {"role": "assistant", "content": "It is <b>.", "reasoning_content": "Hm.\nSo", "thinking": "Hm.\nSo"}
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    before, after = render(asked, add_generation_prompt=True), render([*asked, answer]).rstrip().removesuffix("</s>")
    if not after.startswith(before):
        pytest.skip("the turn does not begin as the generation prompt does: <think> stands there")
    ids = tokenizer(after[len(before) :].rstrip(), add_special_tokens=False)["input_ids"]
    text = generate._text(name, tokenizer, ids)
    has_thought = "Hm." in after
    assert text == ("<think>\nHm.\nSo\n</think>\n\n" if has_thought else "") + "It is <b>."
    assert not capsys.readouterr().err
    settings = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=2000))
    opened = SimpleNamespace(tokenizer=tokenizer, settings=settings, name=name)
    written = [*asked, {"role": "assistant", "content": text}, *asked]
    chat = [*asked, answer if has_thought else {"role": "assistant", "content": text}, *asked]
    spelled = tokenizer.decode(generate.token_ids(opened, written))  # type: ignore[arg-type]
    assert spelled == render(chat, add_generation_prompt=True)

    assert generate._text(name, tokenizer, [*ids[:3], tokenizer.bos_token_id, *ids]) != text
    assert f"special tokens within a text of '{name}' are left out of it: " in capsys.readouterr().err


def test_a_thought_that_was_cut_is_closed() -> None:
    tokenizer = tokenizer_with(of_trl("gptoss"))
    ids = tokenizer("<|channel|>analysis<|message|>Hm", add_special_tokens=False)["input_ids"]
    assert generate._text("gptoss", tokenizer, ids) == "<think>\nHm\n</think>\n\n"


def test_a_text_that_is_cut_is_said_while_it_is_printed(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(small_model, tmp_path, dirs_exist_ok=True)
    opened = open_model(str(tmp_path), device="cpu")
    text = generate.generate(opened, PROMPT, max_new_tokens=5, stream=True)
    printed = capsys.readouterr()
    assert printed.out.rstrip("\n") == text
    assert "ends after 5 tokens (--max-new-tokens)" in printed.err
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(2048)]}))
    generate.generate(open_model(str(tmp_path), device="cpu"), PROMPT, max_new_tokens=5, stream=True)
    printed = capsys.readouterr()
    assert printed.out.rstrip("\n") == printed.err == ""


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (of_trl("gemma"), "refuses it: System role not supported"),
        ("{{ foo.bar }}", "refuses it: 'foo' is undefined"),
        ("{{ messages[0]['content'] }}", "leaves out 'hi' in content of message 2"),
        (of_trl("llava_next"), "refuses it"),
        ("{% for i in range(9999) %}{% for i in range(9999) %}{% endfor %}{% endfor %}", "chat template"),
    ],
)
def test_what_a_template_refuses_or_leaves_out(template: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for data: no traceback, no endless template, and no question without its text."""
    monkeypatch.setattr(chat_template, "_SECONDS", 0.5)
    opened: Any = SimpleNamespace(tokenizer=tokenizer_with(template), name="x")
    with pytest.raises(UserError, match=message):
        generate.token_ids(opened, [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}])
