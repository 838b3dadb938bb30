"""Records of other tools as chats, or as prompt and completion; and what a chat must hold.

Alpaca    {"instruction": .., "input": .., "output": ..}           and, of some, "system" and "history"
ShareGPT  {"conversations": [{"from": "human", "value": ..}, ..]}  and, of some, "system" and "tools"
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from moetune.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
_SPEAKERS = {
    **{role: role for role in ROLES},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"),
}
"""Speakers in ShareGPT files, and their roles."""
_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
"""The prompt of Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca)."""
_AS_ALPACA = (("instruction", "context", "response"), ("question", "context", "answer"))
"""Other names of Alpaca's instruction, input and output: Dolly's, and questions with answers."""


class MalformedError(UserError):
    """One record cannot be used; the message says why."""


def with_alpaca_names(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with Alpaca's names added to those of Dolly or of a question and its answer."""
    for asked, given, answered in _AS_ALPACA:
        if record.get(asked) is not None and record.get(answered) is not None and record.get("output") is None:
            found = {"instruction": record[asked], "input": record.get(given, record.get("input"))}
            return {**record, **found, "output": record[answered]}
    return record


def alpaca_prompt(record: dict[str, Any]) -> dict[str, Any]:
    """Return prompt and completion as Stanford Alpaca writes them, for models without a chat template."""
    if lost := [key for key in ("system", "history") if record.get(key)]:
        raise MalformedError(f"{' and '.join(lost)} need a chat template; name one in data.chat_template")
    instruction, given = checked_text(record["instruction"], "instruction"), _optional(record, "input")
    paired = ", paired with an input that provides further context" if given else ""
    block = f"### Input:\n{given}\n\n" if given else ""
    prompt = _ALPACA.format(paired=paired, instruction=instruction, input=block)
    return {"prompt": prompt, "completion": record["output"]}


def alpaca_chat(record: dict[str, Any]) -> dict[str, Any]:
    """Return an Alpaca record as a chat: its earlier turns, instruction and input, output."""
    system, given = _optional(record, "system"), _optional(record, "input")
    turns = [(question, answer) for question, answer in record.get("history") or ()]
    asked = "\n\n".join((checked_text(record["instruction"], "instruction"), *([given] if given else ())))
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in (*turns, (asked, record["output"])):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def sharegpt_chat(record: dict[str, Any]) -> dict[str, Any]:
    """Return a ShareGPT record as a chat."""
    turns, system = record["conversations"], _optional(record, "system")
    if not isinstance(turns, list):
        raise MalformedError(f"conversations is {kind(turns)}, not a list")
    messages: list[Any] = [{"role": "system", "content": system}] if system else []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise MalformedError(f"turn {number} is {kind(turn)}, not an object with from and value")
        speaker = turn.get("from", turn.get("role"))
        if speaker not in _SPEAKERS:
            raise MalformedError(f"turn {number}: unknown speaker {speaker!r}; it may be {', '.join(_SPEAKERS)}")
        message = {"role": _SPEAKERS[speaker], "content": turn.get("value", turn.get("content"))}
        messages.append(message | {key: turn[key] for key in ("weight",) if key in turn})
    return {"messages": messages, "tools": record.get("tools")}


def checked_messages(value: object) -> list[dict[str, Any]]:
    """Return the messages of a chat without null values; raise `MalformedError` if no chat template takes them.

    An assistant's content may be null beside tool calls.
    """
    if not isinstance(value, list):
        raise MalformedError(f"messages is {kind(value)}, not a list")
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict):
            raise MalformedError(f"message {number} is {kind(message)}, not an object with role and content")
        role, content, calls = (message.get(key) for key in ("role", "content", "tool_calls"))
        if role not in ROLES:
            raise MalformedError(f"message {number}: unknown role {role!r}; it may be {', '.join(ROLES)}")
        if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
            raise MalformedError(f"tool_calls of message {number} is no list of objects")
        if message.get("weight") not in (None, 0, 1):
            raise MalformedError(f"weight of message {number} is {message['weight']!r}; it may be 0 or 1")
        # An empty system message is common, and harmless.
        if not (calls and content in (None, "")) and (role == "assistant" or content != ""):
            checked_text(content, f"content of message {number}")
        # Parquet has every key in every message.
        messages.append({"content": None} | {key: given for key, given in message.items() if given is not None})
    if not any(message["role"] == "assistant" for message in messages):
        raise MalformedError("no message of the assistant, so nothing to train on")
    return messages


def lost_content(messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> dict[int, str]:
    """Find content that a chat template drops, wholly or in part.

    The words of a content must stand in the rendered chat in their order, and so must a mark that is added to its end.
    White space and escapes may differ.

    Returns:
        By the index of a message, what of it is lost.
    """
    written, marks = render(messages), [f"QXZ{index}ZXQ" for index in range(len(messages))]
    with_text = [index for index, message in enumerate(messages) if (message["content"] or "").strip()]
    marked = list(messages)
    for index in with_text:
        marked[index] = {**messages[index], "content": f"{messages[index]['content']} {marks[index]}"}
    try:
        ends: str | None = render(marked)
    except UserError:
        raise
    except Exception:  # the template takes no other content
        ends = None
    lost: dict[int, str] = {}
    for index in with_text:
        content = messages[index]["content"]
        missing = None if content.strip() in written else _first_missing_word(content, written)
        if missing is not None:
            lost[index] = f"{missing[:40]!r} in the content of message {index + 1}"
        elif ends is not None and marks[index] not in ends:
            lost[index] = f"the end of the content of message {index + 1}"
    return lost


def _first_missing_word(content: str, written: str) -> str | None:
    """The first word of a content that does not follow the one before it in what was written."""
    position, written = 0, written.casefold()
    for match in re.finditer(r"\w+", content.casefold()):
        found = written.find(match[0], position)
        if found < 0:
            return match[0]
        position = found + len(match[0])
    return None


def checked_tools(value: object) -> list[Any] | None:
    """Return the tools of a chat, given as a list or as its JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError:
            raise MalformedError("tools is neither a list nor the JSON text of one") from None
    if not (value is None or isinstance(value, list)):
        raise MalformedError(f"tools is {kind(value)}, not a list")
    return value or None


def checked_text(value: object, what: str) -> str:
    """Return a value that is text and can be tokenized; raise `MalformedError` for any other."""
    if not isinstance(value, str):
        raise MalformedError(f"{what} is {kind(value)}, not text")
    if not value.strip():
        raise MalformedError(f"{what} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise MalformedError(f"{what} holds half of a surrogate pair, which is no character") from None
    return value


def kind(value: object) -> str:
    """Return JSON's name for the type of a value."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def _optional(record: dict[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str | None):
        raise MalformedError(f"{key} is {kind(value)}, not text")
    return (value or "").strip()
