"""Records of other programs, as chats: what is trained is what the same chat trains in the plain spelling."""

import csv
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.training.data.chats.test_tool_calls import RESULT, SPELLINGS, chat, encoded, refusal, templated
from tests.training.data.test_load import ASSISTANT, CHATML, MARKED, USER, load, make_tokenizer

PLAIN = {"messages": [USER, ASSISTANT]}


def parts(*texts, type="text", **further):
    return [{"type": type, "text": text, **further} for text in texts]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prompts", "marked"])
@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{**USER, "content": parts("hi")}, {**ASSISTANT, "content": parts("y", "e", "s")}]},
        {
            "messages": [
                {**USER, "content": parts("hi", type="input_text")},
                {**ASSISTANT, "content": parts("yes", type="output_text")},
            ]
        },
        {"messages": [{**USER, "content": [{"type": "text", "text": "hi", "image": None}]}, ASSISTANT]},
        {"messages": json.dumps([USER, ASSISTANT])},
        {"messages": f"\n{json.dumps([USER, ASSISTANT], indent=1)}\n", "tools": ""},
        {"conversations": json.dumps([{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}])},
        {"conversations": [{"role": "user", "content": parts("hi")}, {"role": "assistant", "content": "yes"}]},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"prompt": [USER], "completion": [ASSISTANT], "tools": None, "label": None},
        {"chosen": "x", "rejected": "y", **PLAIN},
        {"conversation": [USER, ASSISTANT], "model": "m", "turn": 1},
        {"messages": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
        {"messages": {"role": ["user", "assistant"], "content": ["hi", "yes"]}},
        {"messages": {"from": ["human", "gpt"], "value": ["hi", "yes"]}},
        {"question": "hi", "response": "yes", "system_prompt": None},
        {"instruction": "hi", "context": "", "response": "yes", "category": "talk"},
        {"query": "hi", "response": "yes"},
        {"question": "hi", "answer": "yes"},
        {"images": [], "chat_template_kwargs": {}, "label": 1, **PLAIN},
        {"chat_template_kwargs": {"enable_thinking": None}, **PLAIN},  # as a table holds those of other rows
    ],
)
def test_other_spellings_of_a_chat_train_its_tokens(template, record):
    tokenizer = make_tokenizer(template)
    assert encoded(tokenizer, record) == encoded(tokenizer, PLAIN)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_chats_as_json_text_from_every_file(tmp_path, suffix):
    """Files with columns hold messages, arguments and tools as JSON text, because these are unlike from row to row."""
    file, record = tmp_path / f"data.{suffix}", SPELLINGS["all as text"]
    if suffix == "csv":
        with file.open("w", newline="") as handle:
            csv.writer(handle).writerows([record.keys(), record.values()])
    elif suffix == "parquet":
        pq.write_table(pa.Table.from_pylist([record]), file)
    else:
        file.write_text(json.dumps([record] if suffix == "json" else record))
    tokenizer = templated("qwen2_5")
    (row,) = load(file, tokenizer, 4096, packing=False).train
    ((written, _),) = encoded(tokenizer, chat())
    assert tokenizer.decode(row["input_ids"]) == written


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prompts", "marked"])
def test_of_a_conversational_prompt_nothing_trains(template):
    tokenizer, again = make_tokenizer(template), {"role": "assistant", "content": "no"}
    system = {"role": "system", "content": "s"}
    record = {"prompt": [system, USER, ASSISTANT, USER], "completion": [again]}
    ((written, trained),) = encoded(tokenizer, record)
    assert written == tokenizer.apply_chat_template([*record["prompt"], again], tokenize=False)
    assert trained == ("no<|im_end|>\n" if template is CHATML else "no</s>")


@pytest.mark.parametrize("names", [("instruction", "output"), ("question", "response")])
def test_a_system_prompt_is_the_system_message(names):
    record = {"system_prompt": "s", **dict(zip(names, ("hi", "yes"), strict=True))}
    plain = {"messages": [{"role": "system", "content": "s"}, USER, ASSISTANT]}
    tokenizer = make_tokenizer(CHATML)
    assert encoded(tokenizer, record) == encoded(tokenizer, plain)


def test_what_is_not_read_of_records_is_said(tmp_path):
    file = tmp_path / "data.jsonl"
    said = {**USER, "content": parts("hello", cache_control={"type": "ephemeral"}, annotations=[])}
    records = [PLAIN, {"id": 7, "tags": [], "reasoning": "hm", "messages": [said, {**ASSISTANT, "refusal": "no"}]}]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    counts = load(file, make_tokenizer(CHATML), 64).counts
    keys = "content.cache_control (of messages), id, reasoning, refusal (of messages)"
    assert counts.unread == (f"{str(file)!r}: keys whose values are not read: {keys}",)
    file.write_text(json.dumps({"prompt": "a", "completion": "b"}))
    assert load(file, make_tokenizer(CHATML), 64).counts.unread == ()


def test_texts_that_other_programs_damaged_are_counted(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "\\frac{1}{2} caf\\ufffd"}\n{"text": " NaN"}\n{"text": "a banana"}')
    said = "\n".join(load(tmp_path / "data.jsonl", make_tokenizer(CHATML), 64).counts.unread)
    assert re.findall(r"1 text with .*(U\+FFFD|frac|nan),?", said) == ["U+FFFD", "frac", "nan"]


def test_messages_that_a_template_wraps_again_are_counted(tmp_path):
    """NousResearch/hermes-function-calling-v1 has <tool_response> in its messages, which Qwen's templates write too."""
    file = tmp_path / "data.jsonl"
    twice = chat(result={**RESULT, "content": "<tool_response>\n3\n</tool_response>"})
    file.write_text(f"{json.dumps(chat())}\n{json.dumps(twice)}\n")
    (said,) = load(file, templated("qwen2_5"), 4096, packing=False).counts.unread
    assert said.endswith("1 message beginning with <tool_response>, which the chat template writes before it again")


def test_calls_of_tools_that_a_chat_does_not_declare_are_counted(tmp_path):
    """NVIDIA-NeMo/Automodel#2324: the model learns to call what it was never shown."""
    file = tmp_path / "data.jsonl"
    record = chat()
    bare = {key: value for key, value in record.items() if key != "tools"}
    file.write_text(f"{json.dumps(record)}\n{json.dumps(bare)}\n")
    counts = load(file, templated("qwen2_5"), 4096, packing=False).counts
    assert counts.unread == (f"{str(file)!r}: 1 chat with calls of tools that its `tools` lacks, as lookup",)


def test_text_prompts_that_look_like_messages_stay_text():
    tokenizer = make_tokenizer(CHATML, bos=False)
    record = {"prompt": json.dumps([USER]), "completion": "yes"}
    assert encoded(tokenizer, record) == [(f"{record['prompt']}yes</s>", "yes</s>")]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            {"prompt": [USER], "completion": "yes"},
            "prompt is a list and completion is text; write both as text, or both",
        ),
        ({"prompt": "hi", "completion": [ASSISTANT]}, "prompt is text and completion is a list"),
        ({"completion": [ASSISTANT]}, "prompt is null and completion is a list"),
        ({"prompt": [USER], "completion": [USER]}, "no message of the assistant"),
        ({"prompt": ["hi"], "completion": [ASSISTANT]}, "message 1 is text, not an object"),
        ({"prompt": "hi", "chosen": "yes", "rejected": "no"}, "docs/guides/preferences.md"),
        ({"chosen": [USER, ASSISTANT], "rejected": [USER, ASSISTANT]}, "docs/guides/preferences.md"),
        (
            {"conversations": [{"from": "human", "value": "hi"}], "chosen": {}, "rejected": {}},
            "docs/guides/preferences.md",
        ),
        ({"prompt": "hi", "completion": "no", "label": False}, "docs/guides/preferences.md"),
        ({"prompt": "hi", "completion": "no", "label": "True"}, "docs/guides/preferences.md"),
        ({"prompt": "hi", "completion": "no", "label": 0}, "label is 0, which"),
        ({"label": False, **PLAIN}, "docs/guides/preferences.md"),
        ({"instruction": "hi", "output": "no", "kto_tag": False}, "kto_tag is false"),
        ({"conversation": [{"human": "hi", "assistant": "yes"}]}, "turn 1 holds human, assistant, and no from or role"),
        (
            {"conversation": [{"from": "human", "value": "a", "content": "b"}]},
            "turn 1 has one text as value and another",
        ),
        ({"messages": None, "prompt": "hi", "completion": None}, "it holds prompt; a record needs"),
        ({"messages": [{"author": "user", "content": "hi"}]}, "message 1 holds author, content, and no role"),
        ({"images": ["a.png"], **PLAIN}, "it holds images, and only text is read"),
        ({"question": "hi", "answer": "yes", "image": "a.png"}, "it holds image,"),
        ({"chat_template_kwargs": {"enable_thinking": False}, **PLAIN}, "data.template"),
        ({"prompt": "hi <think>\n", "completion": "hm"}, "completion opens <think> and does not close it"),
        ({"prompt": "hi", "completion": "yes", "system": "s"}, "system beside prompt and completion would be lost"),
        ({"messages": [USER, {**ASSISTANT, "mask": True}]}, "message 2 says by 'mask'"),
        ({"messages": [USER, ASSISTANT], "loss_mask": [0, 1]}, "it says by 'loss_mask' which messages train"),
        (
            {"messages": [USER, {**ASSISTANT, "channel": "analysis"}, {**ASSISTANT, "channel": "final"}]},
            "channel analysis, and would be an answer: write its text as thinking",
        ),
        (
            {"messages": "[{'role': 'user', 'content': 'hi'}]"},
            "messages is text and not valid JSON, \"[{'role': 'user'",
        ),
        ({"messages": {"role": ["user", "assistant"], "content": ["hi"]}}, "(2 of role, 1 of content); write a list"),
        ({"messages": '{"role": "user"}'}, "messages is an object, not a list"),
        ({"messages": '[{"role": "user", "role": "user"}]'}, "the key 'role' appears more than once"),
        ({"conversations": "hi"}, "conversations is text and not valid JSON, 'hi'"),
        ({"messages": [{**USER, "content": [*parts("hi"), {"type": "image"}]}, ASSISTANT]}, "message 1 holds 'image'"),
        ({"messages": [{**USER, "content": [{"type": "image_url", "image_url": {}}]}, ASSISTANT]}, "holds 'image_url'"),
        (
            {"messages": [USER, {**ASSISTANT, "content": [{"type": "tool_use", "name": "f"}]}]},
            "message 2 holds 'tool_use', and only text is read",
        ),
        ({"messages": [USER, {**ASSISTANT, "content": parts("a", weight=0)}]}, "a part of message 2 says by 'weight'"),
        ({"messages": [{**USER, "content": ["hi"]}, ASSISTANT]}, "content of message 1 is a list of other things"),
        ({"messages": [{**USER, "content": []}, ASSISTANT]}, "content of message 1 is a list of other things"),
        (
            {"messages": [{**USER, "content": [{"type": "text", "text": 3}]}, ASSISTANT]},
            "content of message 1 is a list",
        ),
        ({"messages": [{**USER, "content": {"text": "hi"}}, ASSISTANT]}, "content of message 1 is an object, not text"),
        ({"messages": [USER, {**ASSISTANT, "content": parts("")}]}, "content of message 2 is empty"),
        ({"messages": [USER, {"role": "assistant"}]}, "content of message 2 is null, not text"),
        ({"messages": [USER, {"role": "bot", "content": "a"}]}, "message 2: unknown role 'bot'; it may be system,"),
        ({"messages": [USER, ASSISTANT], "functions": [{"name": "f"}]}, "the chat template leaves out tools"),
        ({"system": "kind", "messages": [{"role": "system", "content": "rude"}, USER, ASSISTANT]}, "given twice"),
        ({"messages": [USER, {**ASSISTANT, "reasoning": "deep"}]}, "leaves out reasoning of message 2"),
        ({"messages": [{**USER, "weight": 1}, ASSISTANT]}, "weight of message 1 is 1, and the user's messages do not"),
        ({"messages": [{**USER, "name": "Ann"}, ASSISTANT]}, "leaves out name of message 1"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f"}]}, ASSISTANT]},
            "leaves out tool_calls of message 2",
        ),
    ],
)
def test_what_cannot_be_read_as_a_chat_is_named(record, said):
    assert said in refusal(make_tokenizer(CHATML), record)


@pytest.mark.parametrize(
    ("content", "written"),
    [
        ({"a": "å", "b": None}, '{"a": "å", "b": null}'),
        ([1, {"a": 2}], '[1, {"a": 2}]'),
        ([], "[]"),
        (3, "3"),
        ("", ""),
        (parts("a", "b"), "ab"),
        ([{"type": "hotel", "text": "x"}], '[{"type": "hotel", "text": "x"}]'),
        (False, "false"),
    ],
)
def test_the_result_of_a_tool_is_text_or_its_json(content, written):
    tokenizer = make_tokenizer(CHATML)
    record = {"messages": [USER, ASSISTANT, {"role": "tool", "content": content}, ASSISTANT]}
    assert f"<|im_start|>tool\n{written}<|im_end|>" in encoded(tokenizer, record)[0][0]
