"""Batches of prompts with a static cache generate, for every type, what each prompt generates without a cache."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from moetune.errors import UserError
from moetune.inference import generate
from moetune.inference.completions import _batches
from moetune.inference.memory import predict_generate
from moetune.inference.opened import Opened, find, open_model
from tests import toys
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

    def batch_decode(self, rows: torch.Tensor, skip_special_tokens: bool) -> list[str]:
        return [str(row.tolist()) for row in rows]


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


@pytest.mark.one_in(28)
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
    (tmp_path / "generation_config.json").write_text(json.dumps({"stop_strings": ["a"], "suppress_tokens": ids}))
    assert predict_generate(find(str(tmp_path), device="cpu"), 3, 4).fullest.peak_allocated


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
