"""Conversion of Alpaca and ShareGPT records to chats or prompts, and checks of the values that a record holds.

Alpaca    {"instruction": .., "input": .., "output": ..}           in some files also "system" and "history"
ShareGPT  {"conversations": [{"from": "human", "value": ..}, ..]}  in some files also "system" and "tools"
"""

import json
from typing import Any

from moetune.errors import UserError
from moetune.training.data.marks import REASONING

ROLES = ("system", "developer", "user", "assistant", "tool")
_SPEAKERS = {
    **{role: role for role in ROLES},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"),
}
"""Name of a speaker in ShareGPT files -> role of the message."""
_TRAINS = ("train", "training", "trainable", "loss")
"""Keys by which messages of other tools' files say whether they are trained on."""
_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
"""The prompt of Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca)."""
_AS_ALPACA = (("instruction", "context", "response"), ("question", "context", "answer"))
"""Other names for Alpaca's (instruction, input, output): those of Dolly, and those of question-answer data."""


class MalformedError(UserError):
    """A single record cannot be used; the message gives the reason."""


def with_alpaca_names(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record under Alpaca's keys: one with the keys of Dolly or of question-answer data as a copy with
    `instruction`, `input` and `output` added, any other as it is."""
    for asked, given, answered in _AS_ALPACA:
        if record.get(asked) is not None and record.get(answered) is not None and record.get("output") is None:
            found = {"instruction": record[asked], "input": record.get(given, record.get("input"))}
            return {**record, **found, "output": record[answered]}
    return record


def alpaca_prompt(record: dict[str, Any]) -> dict[str, Any]:
    """Convert an Alpaca record to `{"prompt": …, "completion": …}` in Stanford Alpaca's words, without a chat template.

    Raises:
        MalformedError: `instruction` or `input` is not text, or the record has `system`, `history` or a thought, which
            the prompt has no place for.
    """
    if lost := [key for key in ("system", "history", *REASONING) if record.get(key)]:
        raise MalformedError(f"{' and '.join(lost)} need a chat template; name one in data.chat_template")
    instruction, given = checked_text(record["instruction"], "instruction"), _optional(record, "input")
    paired = ", paired with an input that provides further context" if given else ""
    block = f"### Input:\n{given}\n\n" if given else ""
    prompt = _ALPACA.format(paired=paired, instruction=instruction, input=block)
    return {"prompt": prompt, "completion": record["output"]}


def alpaca_chat(record: dict[str, Any]) -> dict[str, Any]:
    """Convert an Alpaca record to `{"messages": …}`: system, the turns of `history`, instruction with input, output,
    and a thought that the record has beside the output.

    Raises:
        MalformedError: `instruction`, `input` or `system` is not text, or `history` is not a list of pairs.
    """
    system, given = _optional(record, "system"), _optional(record, "input")
    turns = record.get("history") or []
    if not isinstance(turns, list) or any(not isinstance(turn, list) or len(turn) != 2 for turn in turns):
        raise MalformedError("history is not a list of pairs of question and answer")
    asked = "\n\n".join((checked_text(record["instruction"], "instruction"), *([given] if given else ())))
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in (*turns, (asked, record["output"])):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages[-1] |= {key: record[key] for key in REASONING if isinstance(record.get(key), str)}
    return {"messages": messages}


def sharegpt_chat(record: dict[str, Any]) -> dict[str, Any]:
    """Convert a ShareGPT record to `{"messages": …, "tools": …}`; further keys of a turn are kept, those of the record
    are not.

    Raises:
        MalformedError: `conversations` is not a list of objects, a speaker is unknown, or `system` is not text.
    """
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
        messages.append({key: value for key, value in turn.items() if key not in ("from", "value")} | message)
    return {"messages": messages, "tools": record.get("tools")}


def with_system(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of a chat in which the text under `system`, if any, is the first of the `messages`.

    Raises:
        MalformedError: `system` is not text, or the messages begin with a system message of their own; or the record
            has `functions`, an older name of tools.
    """
    system, messages = _optional(record, "system"), record["messages"]
    if record.get("functions"):
        raise MalformedError("functions would be lost; write them as tools")
    if not system or not isinstance(messages, list):
        return record
    if messages and isinstance(messages[0], dict) and messages[0].get("role") in ("system", "developer"):
        raise MalformedError("system is given twice: beside messages and as the first of them; keep one of them")
    return {**record, "messages": [{"role": "system", "content": system}, *messages]}


def checked_messages(value: object) -> list[dict[str, Any]]:
    """Check the messages of a chat; return copies without null values, except that `content` is always present.

    Raises:
        MalformedError: `value` is not a list of objects; a role is unknown; a content is not text (an image, say), or
            an assistant's is empty although it calls no tool; `tool_calls` is not a list of objects; `weight` is
            neither 0 nor 1, or is written as another training program names it; or no message is the assistant's.
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
        if flags := [key for key in _TRAINS if message.get(key) is not None]:
            raise MalformedError(f"message {number} says by {flags[0]!r} whether it trains; write weight, 0 or 1")
        parts = content if isinstance(content, list) else ()
        others = [part.get("type") for part in parts if isinstance(part, dict) and part.get("type") != "text"]
        if others:
            raise MalformedError(f"message {number} holds {others[0]!r}, and only text is read; leave the record out")
        # An empty system message is common and harmless, so only the assistant's content may not be empty.
        if not (calls and content in (None, "")) and (role == "assistant" or content != ""):
            checked_text(content, f"content of message {number}")
        # Remove null values, because messages read from Parquet have every key.
        messages.append({"content": None} | {key: given for key, given in message.items() if given is not None})
    if not any(message["role"] == "assistant" for message in messages):
        raise MalformedError("no message of the assistant, so nothing to train on")
    return messages


def checked_tools(value: object) -> list[Any] | None:
    """Return the tools of a chat, given as a list or as the JSON text of one; None if there are none.

    Raises:
        MalformedError: `value` is neither.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError:
            raise MalformedError("tools is neither a list nor the JSON text of one") from None
    if not (value is None or isinstance(value, list)):
        raise MalformedError(f"tools is {kind(value)}, not a list")
    return value or None


def checked_text(value: object, what: str) -> str:
    """Return `value` if it is text that can be tokenized; `what` names it in messages.

    Raises:
        MalformedError: `value` is not a string, is empty or white space, or holds an unpaired surrogate.
    """
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
    """Return JSON's name for the type of a value, with an article ("an object", "text"), for messages."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def _optional(record: dict[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str | None):
        raise MalformedError(f"{key} is {kind(value)}, not text")
    return (value or "").strip()
