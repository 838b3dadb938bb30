"""Thoughts under TRL's copies of the models' own templates: where they are written, and what of empty ones trains."""

import json
from pathlib import Path
from typing import Any

import pytest

from moetune.config.schema import DataConfig, TrainConfig
from moetune.errors import UserError
from moetune.inference.generate import token_ids
from moetune.training.data.chats import chat_template
from moetune.training.data.chats.template_arguments import reads
from moetune.training.data.load import Datasets, load_data
from moetune.training.preview import notes
from tests.chat_templates import NAMES, of_trl
from tests.training.data.test_load import CHATML, make_tokenizer

TEMPLATES = {name: of_trl(name) for name in NAMES}
SWITCHED = [
    name
    for name, text in TEMPLATES.items()
    if "enable_thinking" in text and "</think>" in text and "nothink" not in name
]
"""Templates that write an empty thought unless `enable_thinking` or the message says otherwise."""
THINKING = [name for name, text in TEMPLATES.items() if "reasoning_content" in text or "thinking" in text]
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho ho"}
THOUGHT = {**ANSWER, "reasoning_content": "hm <b>\n\nhm"}


def chat(tmp_path: Path, template: str, *messages: dict[str, Any], **arguments: Any) -> tuple[list[Any], Datasets]:
    """The ids and labels of a chat's documents, and the data as they were read."""
    (tmp_path / "one.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    settings = DataConfig(train=str(tmp_path / "one.jsonl"), packing=False, template=arguments)
    data = load_data(settings, make_tokenizer(template, bos=False), TrainConfig(sequence_length=8192))
    return [(row["input_ids"], row["labels"]) for row in data.train], data


def trained(documents: list[Any]) -> list[str]:
    tokenizer = make_tokenizer()
    return [tokenizer.decode([label for label in labels if label != -100]) for _, labels in documents]


@pytest.mark.parametrize("name", SWITCHED)
@pytest.mark.one_in(7)
def test_an_empty_thought_has_no_loss_unless_it_is_asked_for(name: str, tmp_path: Path) -> None:
    template = TEMPLATES[name]
    as_it_is, data = chat(tmp_path, template, USER, ANSWER, USER, ANSWER)
    assert "think" not in "".join(trained(as_it_is))
    assert "".join(trained(as_it_is)).count("ho ho") == 2
    assert data.counts.settings == {"enable_thinking: false": 2}
    assert any("data.template: {enable_thinking: false}" in note for note in notes(data))

    off, data = chat(tmp_path, template, USER, ANSWER, USER, ANSWER, enable_thinking=False)
    assert trained(off) == trained(as_it_is)
    assert not data.counts.settings
    if name.startswith("nemotron") and "training" not in name:  # the prompt opens a thought as the turn does not
        with pytest.raises(UserError, match=r"data\.template: \{enable_thinking: false\}"):
            chat(tmp_path, template, USER, ANSWER, enable_thinking=True)
    else:
        assert "</think>" in trained(chat(tmp_path, template, USER, ANSWER, enable_thinking=True)[0])[0]


@pytest.mark.parametrize("name", SWITCHED)
@pytest.mark.one_in(7)
def test_a_thought_trains_beside_turns_without_one(name: str, tmp_path: Path) -> None:
    template = TEMPLATES[name]
    both, data = chat(tmp_path, template, USER, ANSWER, USER, THOUGHT)
    text = "".join(trained(both))
    assert (text.count("hm <b>\n\nhm"), text.count("</think>"), text.count("ho ho")) == (1, 1, 2)
    assert data.counts.settings == {"enable_thinking: false": 1}
    if "training" not in name:
        with pytest.raises(UserError, match=r"enable_thinking: true\}, or take enable_thinking out"):
            chat(tmp_path, template, USER, THOUGHT, enable_thinking=False)


def test_the_other_way_round(tmp_path: Path) -> None:
    template = TEMPLATES["qwen3_5_nothink"]
    found, data = chat(tmp_path, template, USER, THOUGHT)
    assert trained(found) == ["hm <b>\n\nhm\n</think>\n\nho ho<|im_end|>\n"]
    assert data.counts.settings == {"enable_thinking: true": 1}
    found, data = chat(tmp_path, template, USER, ANSWER)
    assert trained(found) == ["ho ho<|im_end|>\n"]
    assert not data.counts.settings


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "deepseekv3"])
def test_a_prompt_that_no_setting_changes_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"<think>\\n.*data\.chat_template"):
        chat(tmp_path, TEMPLATES[name], USER, ANSWER)


def test_a_marked_turn_that_begins_as_no_generation_prompt_is_said(tmp_path: Path) -> None:
    template = TEMPLATES["deepseek_r1_distill_training"]  # its prompt opens a thought
    assert chat(tmp_path, template, USER, ANSWER | {"content": "<think>\nhm\n</think>\n\nho"})[1].counts.settings == {}
    _, data = chat(tmp_path, template, USER, ANSWER)
    assert data.counts.settings == {"": 1}
    assert any("does not begin with the template's generation prompt" in note for note in notes(data))


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.one_in(10)
def test_a_thought_in_the_content_is_one_beside_it(name: str, tmp_path: Path) -> None:
    template = TEMPLATES[name]
    if not reads(template).words & {"reasoning_content", "reasoning", "thinking"}:
        return
    thought = THOUGHT["reasoning_content"]
    spellings = [
        f"<think>\n{thought}\n</think>\n\nho ho",
        f"<think>{thought}</think>ho ho",
        f"{thought}\n</think>\n\nho ho",
    ]
    inside = [{"role": "assistant", "content": content} for content in spellings]
    if name in ("gemma4", "gemma4_v3", "gemma4_v4"):  # these write a thought only beside tool calls
        for message in (THOUGHT, *inside):
            with pytest.raises(UserError, match="leaves out reasoning_content of message 2"):
                chat(tmp_path, template, USER, message)
        return
    beside, _ = chat(tmp_path, template, USER, THOUGHT)
    assert "hm <b>\n\nhm" in trained(beside)[0]
    for message in (*inside, {**THOUGHT, "content": spellings[0]}, {**ANSWER, "thinking": thought}):
        assert chat(tmp_path, template, USER, message)[0] == beside
    empty, _ = chat(tmp_path, template, USER, {"role": "assistant", "content": "<think>\n\n</think>\n\nho ho"})
    assert empty == chat(tmp_path, template, USER, ANSWER)[0]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": "<think>\nhm"}, "message 2 opens <think>"),
        ({"content": "<think>a</think>b", "reasoning_content": "c"}, "message 2 has one thought in its content"),
        ({"content": "<think>a</think>\n\n"}, "message 2 is a thought without an answer"),
    ],
)
def test_a_broken_thought_is_refused(message: dict[str, str], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        chat(tmp_path, TEMPLATES["gptoss"], USER, {"role": "assistant", **message})


@pytest.mark.parametrize("content", ["<think>\nhm", " [THINK]hm", "<seed:think>hm</think>", "<think>hm</think>\n"])
def test_a_broken_thought_is_refused_where_the_template_knows_none(content: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not close it|thought without an answer"):
        chat(tmp_path, CHATML, USER, {"role": "assistant", "content": content})


def test_an_empty_thought_beside_an_answer_is_none(tmp_path: Path) -> None:
    """What a table's column for thoughts holds where there is none; gpt-oss would write a channel for it."""
    plain, _ = chat(tmp_path, TEMPLATES["gptoss"], USER, ANSWER)
    for key in ("reasoning_content", "thinking"):
        assert chat(tmp_path, TEMPLATES["gptoss"], USER, {**ANSWER, key: ""})[0] == plain


@pytest.mark.parametrize(
    "thinking",
    [THOUGHT["reasoning_content"], [{"type": "text", "text": "hm <b>\n"}, {"type": "text", "text": "\nhm"}]],
    ids=["Anthropic", "Mistral"],
)
def test_a_thought_in_parts_of_the_content_is_one_beside_it(thinking: Any, tmp_path: Path) -> None:
    beside, _ = chat(tmp_path, TEMPLATES["qwen3"], USER, THOUGHT)
    parts = [{"type": "thinking", "thinking": thinking}, {"type": "text", "text": "ho ho"}]
    assert chat(tmp_path, TEMPLATES["qwen3"], USER, {"role": "assistant", "content": parts})[0] == beside
    refused = {
        "holds 'thinking'": parts[::-1],
        "content of message 2 is empty": parts[:1],
        "thinking of message 2 is null": [{"type": "thinking"}, *parts[1:]],
    }
    for words, wrong in refused.items():
        with pytest.raises(UserError, match=words):
            chat(tmp_path, TEMPLATES["qwen3"], USER, {"role": "assistant", "content": wrong})


@pytest.mark.parametrize("content", ["Write </think> after it.", "The tags <think>\nand\n</think>\nare two."])
def test_tags_in_a_sentence_are_no_thought(content: str, tmp_path: Path) -> None:
    found, _ = chat(tmp_path, TEMPLATES["gptoss"], USER, {"role": "assistant", "content": content})
    assert trained(found) == [f"<|channel|>final<|message|>{content}<|return|>"]


def test_a_template_without_thoughts_writes_the_tags(tmp_path: Path) -> None:
    content = "<think>\nhm\n</think>\n\nho"
    found, _ = chat(tmp_path, CHATML, USER, {"role": "assistant", "content": content})
    assert trained(found) == [f"{content}<|im_end|>\n"]


def test_an_alpaca_record_with_a_thought(tmp_path: Path) -> None:
    record = {"instruction": "hi", "output": "ho ho", "reasoning": THOUGHT["reasoning_content"]}
    (tmp_path / "alpaca.jsonl").write_text(json.dumps(record) + "\n")
    settings, lengths = (
        DataConfig(train=str(tmp_path / "alpaca.jsonl"), packing=False),
        TrainConfig(sequence_length=8192),
    )
    (row,) = load_data(settings, make_tokenizer(TEMPLATES["qwen3"], bos=False), lengths).train
    assert [(row["input_ids"], row["labels"])] == chat(tmp_path, TEMPLATES["qwen3"], USER, THOUGHT)[0]
    with pytest.raises(UserError, match="reasoning need"):
        load_data(settings, make_tokenizer(), lengths)


def test_earlier_answers_of_a_prompt(tmp_path: Path) -> None:
    """In `generate` and `chat`, whose answers hold their thoughts, the template decides which of them it repeats."""

    class Opened:
        name, tokenizer = "x", make_tokenizer(TEMPLATES["gptoss"], bos=False)

        class settings:
            @staticmethod
            def get_text_config() -> Any:
                return type("Config", (), {"vocab_size": 10**6})

    ids = token_ids(Opened(), [USER, {**ANSWER, "content": "hm\n</think>\nho ho"}, USER])  # type: ignore[arg-type]
    assert "think" not in Opened.tokenizer.decode(ids)


@pytest.mark.parametrize("key", ["reasoning_content", "content"])
def test_thoughts_at_calls_train_although_the_answer_after_them_drops_them(tmp_path: Path, key: str) -> None:
    """gpt-oss leaves out the thoughts at calls once the answer is there; when it is generated they still are."""

    def call(thought: str) -> list[dict[str, Any]]:
        function = {"name": "f", "arguments": {"a": thought}}
        return [
            {
                "role": "assistant",
                "content": "",
                key: thought,
                "tool_calls": [{"type": "function", "function": function}],
            },
            {"role": "tool", "name": "f", "content": "3"},
        ]

    messages = [USER, *call("one"), *call("two"), ANSWER, USER, *call("three"), {**ANSWER, "content": "done"}]
    documents, _ = chat(tmp_path, TEMPLATES["gptoss"], *messages)
    tokenizer = make_tokenizer(TEMPLATES["gptoss"], bos=False)
    expected = [
        tokenizer.apply_chat_template(messages[:end], tokenize=False, add_generation_prompt=True)
        + f"<|channel|>final<|message|>{messages[end]['content']}<|return|>"
        for end in (5, 9)
    ]
    assert [tokenizer.decode(ids) for ids, _ in documents] == expected
    first, second = trained(documents)
    assert [first.count(f"<|message|>{word}<") for word in ("one", "two", "ho ho")] == [1, 1, 1]
    assert [second.count(f"<|message|>{word}<") for word in ("one", "two", "ho ho", "three", "done")] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("name", ["gptoss", "gemma4_v5"])
def test_renderings_do_not_grow_with_the_calls(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These templates write the name of a function above the result of its call again."""
    rendered: list[int] = []
    render = chat_template.render_jinja_template

    def counted(chats: list[Any], *args: Any, **options: Any) -> Any:
        rendered[-1] += 1
        return render(chats, *args, **options)

    monkeypatch.setattr(chat_template, "render_jinja_template", counted)
    function = {"name": "lookup", "arguments": {"city": "Oslo"}}
    turn = [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c", "name": "lookup", "content": "3"},
    ]
    for calls in (8, 16):
        rendered.append(0)
        documents, _ = chat(tmp_path, TEMPLATES[name], USER, *turn * calls, ANSWER)
        assert "".join(trained(documents)).count("Oslo") == calls
    assert rendered[0] == rendered[1]
