"""Texts for the records of a file: those of single prompts, in whatever batch, however often the call was cut off."""

import json
from pathlib import Path
from typing import Any

import pytest

from moetune.atomic import aside_of
from moetune.errors import UserError
from moetune.inference import completions
from moetune.inference.completions import complete
from moetune.inference.generate import generate
from moetune.inference.opened import Opened, open_model
from tests import small

RECORDS: list[dict[str, Any]] = [
    {"prompt": "a router sends", "id": 7},
    {"prompt": "every token of the text to two of four experts"},
    {"messages": [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "the router"}]},
    {"text": "experts"},
    {"messages": [{"role": "user", "content": "how many?"}], "system": "Be brief."},
    {"prompt": [{"role": "user", "content": "who?"}], "messages": None},  # as a table of TRL's has it
]


@pytest.fixture(scope="module")
def opened(small_model: Path) -> Opened:
    return open_model(str(small_model), device="cpu")


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_a_batch_gives_the_texts_of_single_prompts(opened: Opened, tmp_path: Path) -> None:
    data, out = small.write_data(tmp_path / "prompts.jsonl", RECORDS), tmp_path / "out.jsonl"
    done = complete(opened, str(data), out, batch=3, max_new_tokens=6)
    single = [
        generate(opened, prompt, max_new_tokens=6)
        for prompt in (
            RECORDS[0]["prompt"], RECORDS[1]["prompt"], [{"role": "user", "content": "who?"}], RECORDS[3]["text"],
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "how many?"}],
            [{"role": "user", "content": "who?"}],
        )
    ]  # fmt: skip
    assert read(out) == [record | {"generated": text} for record, text in zip(RECORDS, single, strict=True)]
    assert (done.records, done.texts) == (6, 6)
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


@pytest.mark.parametrize("damage", [b"", b'["half a li'])
def test_an_interrupted_call_is_continued(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    data = small.write_data(tmp_path / "prompts.jsonl", RECORDS[:5])
    how: dict[str, Any] = {"batch": 2, "samples": 2, "max_new_tokens": 4, "temperature": 1.5, "seed": 3}
    complete(opened, str(data), tmp_path / "whole.jsonl", **how)

    real, calls = completions.continued, list[int]()

    def cut_off(opened: Opened, rows: list[list[int]], **how: Any) -> list[str]:
        calls.append(len(rows))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(opened, rows, **how)

    monkeypatch.setattr(completions, "continued", cut_off)
    out = tmp_path / "out.jsonl"
    begun = aside_of(out) / "batches.jsonl"
    with pytest.raises(KeyboardInterrupt):
        complete(opened, str(data), out, **how)
    assert not out.exists()
    with begun.open("ab") as file:
        file.write(damage)
    whole = begun.read_bytes()
    for odd in (b"3\n", b'["too", "many", "texts"]\n'):
        begun.write_bytes(whole.rpartition(b"\n")[0] + b"\n" + odd)
        with pytest.raises(UserError, match=r"batches\.jsonl' .*; remove it"):
            complete(opened, str(data), out, **how)
    begun.write_bytes(whole)
    with pytest.raises(UserError, match="other data or settings"):
        complete(opened, str(data), out, **(how | {"seed": 4}))
    complete(opened, str(data), out, **how)
    assert calls == [2, 2, 2, 2, 2, 2]  # three before, and the last three of five batches
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert len(read(out)) == 10
    assert not begun.parent.exists()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "x"}, r"line 2: has the keys 'question'; give it one of prompt, text and messages"),
        ({"prompt": "x", "messages": []}, "give it one of"),
        ({"prompt": 3}, "prompt is a number, not text"),
        ({"prompt": "x", "note": "\ud800"}, "line 2: cannot be written to --out as JSON: .* surrogates not allowed"),
        ({"prompt": "x", "generated": "y"}, "holds 'generated' already"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "nothing to answer"),
        ({"messages": "x"}, "messages is text and not valid JSON, 'x'"),
        ({"messages": 3}, "messages is a number, not a list"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}, "tools would be lost"),
        ({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": 1}}, "_kwargs would be lost"),
        ({"prompt": "x", "system": "y"}, "system would be lost"),
        ({"messages": [{"role": "user", "content": "x"}], "images": ["a.png"]}, "images would be lost"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "prefix": True}]},
            "prefix: answers are not continued",
        ),
        ([], "no object"),
    ],
)
def test_a_record_that_cannot_be_completed_is_named(opened: Opened, tmp_path: Path, record: Any, message: str) -> None:
    data = small.write_data(tmp_path / "prompts.jsonl", [{"prompt": "a"}, record])
    with pytest.raises(UserError, match=message):
        complete(opened, str(data), tmp_path / "out.jsonl")
    assert [file.name for file in tmp_path.iterdir()] == ["prompts.jsonl"]


@pytest.mark.parametrize("written", ["arguments", "(arguments | tojson)"])
def test_calls_before_the_answer_are_written_as_in_training(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    """Arguments as JSON text, content null: as OpenAI's clients send them."""
    template = (
        "{% for m in messages %}[{{ m.content }}{% for c in m.tool_calls or [] %}"
        f"{{% set arguments = c.function.arguments %}}{{{{ 'call ' + {written} }}}}{{% endfor %}}]{{% endfor %}}"
    )
    monkeypatch.setattr(opened.tokenizer, "chat_template", template)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    calling, result = (
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": {"b": 2}},
    )
    record = {"messages": [{"role": "user", "content": "hi"}, calling, result]}
    expected = opened.tokenizer('[hi][call {"a": 1}][{"b": 2}]', add_special_tokens=False)["input_ids"]
    assert completions._token_ids(opened, "line 1", record) == expected


def test_what_is_there_is_kept(opened: Opened, tmp_path: Path) -> None:
    data, out = small.write_data(tmp_path / "prompts.jsonl", RECORDS), tmp_path / "out.jsonl"
    out.write_text("mine")
    with pytest.raises(UserError, match=r"out\.jsonl' exists"):
        complete(opened, str(data), out)
    assert out.read_text() == "mine"
    with pytest.raises(UserError, match="--samples 2 at temperature 0"):
        complete(opened, str(data), tmp_path / "other.jsonl", samples=2)
