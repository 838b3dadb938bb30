"""Records of other programs converted to chats or prompts; checks of messages.

Alpaca    {"instruction": .., "input": .., "output": ..}           in some files also "system" and "history"
OpenOrca  {"system_prompt": .., "question": .., "response": ..}
ms-swift  {"query": .., "response": ..}                            in some files also "system" and "history"
ShareGPT  {"conversations": [{"from": "human", "value": ..}, ..]}  in some files also "system" and "tools"
TRL       {"prompt": [messages], "completion": [messages]}
xLAM      {"query": .., "tools": [..], "answers": [calls]}
LMSYS     {"conversation": [messages]}
"""

from itertools import takewhile
from typing import Any

from moetune.errors import shown
from moetune.training.data.chats.marks import REASONING
from moetune.training.data.chats.tool_calls import checked_calls
from moetune.training.data.values import MalformedError, by_rows, checked_list, checked_text, json_text, kind, parsed

ROLES = ("system", "developer", "user", "assistant", "tool")
_SPEAKERS = {
    **{role: role for role in ROLES},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response"), "tool"),
}
"""Name of a speaker in ShareGPT files -> role of the message."""
_CALLERS = ("function_call", "tool_call")
"""Speakers whose text is the JSON of calls."""
_TRAINS = (
    *("train", "training", "trainable", "loss", "mask", "masked"),
    *("train_detail", "training_detail", "loss_mask", "loss_scale", "loss_weight"),
)
"""Keys by which messages of other tools' files, or lists beside them, say whether they are trained on."""
_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
"""The prompt of Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca)."""
_AS_ALPACA = (
    ("instruction", "context", "response"),
    ("question", "context", "answer"),
    ("question", "context", "response"),
    ("query", "context", "response"),
)
"""Other names for Alpaca's (instruction, input, output): of Dolly, question-answer data, OpenOrca, and ms-swift."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA_PARTS = ("image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url", "file")
"""Types of a message's parts in the formats of OpenAI and of Hugging Face's processors."""
_TURNS = ("messages", "conversations", "conversation", "prompt", "completion")
"""Keys of records under which messages may stand."""
_TRAINED = ("completion", "output", "text")
"""Keys of other formats that hold what is trained on."""
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Keys of records that hold what stands at placeholders, such as `<image>`, in their text."""


def with_known_keys(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record under the keys of a format: a copy with other names replaced if it has some, else as it is.

    Those of Dolly, OpenOrca and question-answer data become Alpaca's `instruction`, `input` and `output`,
    `system_prompt` becomes `system`, `tool_defs` (of verifiers' rollouts) `tools`, and LMSYS' `conversation`, or
    messages with ShareGPT's keys, `conversations`. A prompt and completion that are lists of messages, as for TRL,
    become `messages`, of which those of the prompt have `weight` 0; so does xLAM's query with its answers, which are
    calls of tools. Messages may be kept by keys.

    Raises:
        MalformedError: only one of prompt and completion is a list; or the record holds preferences: two answers, of
            which one was chosen, or a label that says whether the answer is wanted; or a list of what trains; or
            images, sounds or videos beside a prompt or chat; or arguments of the chat template.
    """
    _refuse_other_uses(record)
    if columns := [key for key in _TURNS if isinstance(record.get(key), dict)]:
        record = record | {key: by_rows(record[key], key) for key in columns}
    for asked, given, answered in _AS_ALPACA:
        if record.get(asked) is not None and record.get(answered) is not None and record.get("output") is None:
            given = given if record.get(given) is not None else "input"
            record = _renamed(record, {asked: "instruction", given: "input", answered: "output"})
    if record.get("system") is None and record.get("text") is None:
        record = _renamed(record, {"system_prompt": "system"})
    if record.get("tools") is None:
        record = _renamed(record, {"tool_defs": "tools"})
    messages = record.get("messages")
    if messages is not None:
        is_sharegpt = (
            isinstance(messages, list) and messages and isinstance(messages[0], dict) and messages[0].get("from")
        )
        return _renamed(record, {"messages": "conversations"}) if is_sharegpt else record
    if isinstance(record.get("conversation"), list) and record.get("conversations") is None:
        return _renamed(record, {"conversation": "conversations"})
    prompt, completion, query, answers = (record.get(key) for key in ("prompt", "completion", "query", "answers"))
    if isinstance(prompt, list) and isinstance(completion, list):
        context = [{**m, "weight": 0} if isinstance(m, dict) and m.get("role") == "assistant" else m for m in prompt]
        return _renamed(record, {"prompt": "", "completion": ""}) | {"messages": [*context, *completion]}
    if completion is not None and (isinstance(prompt, list) or isinstance(completion, list)):
        raise MalformedError(
            f"prompt is {kind(prompt)} and completion is {kind(completion)}; write both as text, or both as lists of "
            "messages"
        )
    if query is not None and answers is not None and record.get("tools") is not None:
        messages = [{"role": "user", "content": query}, {"role": "assistant", "tool_calls": answers}]
        return _renamed(record, {"query": "", "answers": ""}) | {"messages": messages}
    return record


def _renamed(record: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return a copy of a record with other names for some of its keys; one that becomes "" is left out."""
    renamed = {key: value for key, value in record.items() if key not in names and key not in names.values()}
    for old, new in names.items():
        renamed |= {new: record[old]} if new and old in record else {}
    return renamed


def _refuse_other_uses(record: dict[str, Any]) -> None:
    """Raise `MalformedError` for a record that is written for another kind of training, or for other inputs than
    text."""
    is_text = record.get("text") is not None
    pair = (record.get("chosen"), record.get("rejected"))
    if None not in pair and all(record.get(key) is None for key in ("messages", *_TRAINED)):
        raise MalformedError(
            "it holds preferences, chosen and rejected: docs/guides/preferences.md shows how to train on both; to "
            "train on the chosen answers only, write each as completion, or as the last of messages"
        )
    for key in ("label", "kto_tag"):
        label = str(record.get(key)).lower()
        is_wish = label in ("true", "false") or (label in ("0", "1", "0.0", "1.0") and record.get("completion"))
        if is_wish and not is_text:
            raise MalformedError(
                f"{key} is {label}, which says whether the answer is wanted, and every answer would be trained on: "
                f"docs/guides/preferences.md shows how to train on preferences; or keep those that are, without {key}"
            )
    if flags := [key for key in _TRAINS if isinstance(record.get(key), list)]:
        raise MalformedError(f"it says by {flags[0]!r} which messages train; write weight, 0 or 1, into each message")
    if not is_text and (media := [key for key in MEDIA if record.get(key)]):
        raise MalformedError(f"it holds {media[0]}, and only text is read; leave the record out")
    kwargs = record.get("chat_template_kwargs")
    if kwargs and not (isinstance(kwargs, dict) and all(value is None for value in kwargs.values())):
        raise MalformedError(
            "chat_template_kwargs of a single record are not applied; write arguments of the chat template in "
            "data.template, which holds for all records, and leave the key out"
        )


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

    A turn of `function_call` becomes a message with calls of tools. Its text is the JSON of a call, or of a list of
    them, perhaps after a thought that ends with `</think>`.

    Raises:
        MalformedError: `conversations` is neither a list of objects nor the JSON text of one, a speaker is unknown, the
            text of a `function_call` is no JSON of calls, or `system` is not text.
    """
    messages: list[Any] = []
    for number, turn in enumerate(checked_list(record["conversations"], "conversations"), 1):
        if not isinstance(turn, dict):
            raise MalformedError(f"turn {number} is {kind(turn)}, not an object with from and value")
        speaker = turn.get("from") or turn.get("role")
        if speaker is None:
            raise MalformedError(f"turn {number} holds {', '.join(turn) or 'nothing'}, and no from or role")
        if not isinstance(speaker, str) or speaker not in _SPEAKERS:
            raise MalformedError(f"turn {number}: unknown speaker {speaker!r}; it may be {', '.join(_SPEAKERS)}")
        said = turn["value"] if turn.get("value") is not None else turn.get("content")
        if turn.get("content") not in (None, said):
            raise MalformedError(f"turn {number} has one text as value and another as content; keep one of them")
        message = {"role": _SPEAKERS[speaker], "content": said}
        if speaker in _CALLERS:
            thought, mark, calls = said.rpartition("</think>") if isinstance(said, str) else ("", "", said)
            if isinstance(calls, str):
                calls = parsed(calls, f"{speaker} of turn {number}")
            calls = checked_calls(calls if isinstance(calls, list) else [calls], f"turn {number}")
            message |= {"content": thought + mark, "tool_calls": calls}
        messages.append({key: value for key, value in turn.items() if key not in ("from", "value")} | message)
    return chat_of(record | {"messages": messages})


def chat_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a chat as `{"messages": …, "tools": …}`: the text under `system`, if any, becomes the first
    message.

    Raises:
        MalformedError: `system` is not text, or the messages begin with a system message of their own; `messages` is
            neither a list nor the JSON text of one; or tools are given twice.
    """
    system, messages = _optional(record, "system"), checked_list(record["messages"], "messages")
    if system:
        if messages and isinstance(messages[0], dict) and messages[0].get("role") in ("system", "developer"):
            raise MalformedError("system is given twice: beside messages and as the first of them; keep one of them")
        messages = [{"role": "system", "content": system}, *messages]
    if record.get("tools") and record.get("functions"):  # their older name
        raise MalformedError("tools are given twice: as tools and as functions; keep one of them")
    return {"messages": messages, "tools": record.get("tools") or record.get("functions")}


def checked_messages(value: list[Any]) -> list[dict[str, Any]]:
    """Check the messages of a chat; return them in one spelling, without null values.

    In this spelling `content` is text, "" beside `tool_calls` if there is none; parts of text are joined with nothing
    between; parts of the assistant's thought before them are its `reasoning_content`; a tool's result that is no text
    is its JSON. `tool_calls` are as `checked_calls` returns them, the older
    `function_call` and the role `function` included.

    Raises:
        MalformedError: a message is no object; a role is unknown; a content is not text (an image, say), or an
            assistant's is empty although it calls no tool; a call of a tool is malformed, or not the assistant's;
            `weight` is neither 0 nor 1, is 1 where the assistant does not speak, or is written as another training
            program names it; or no message is the assistant's.
    """
    messages = []
    for number, given in enumerate(value, 1):
        if not isinstance(given, dict):
            raise MalformedError(f"message {number} is {kind(given)}, not an object with role and content")
        where, message = f"message {number}", {key: of_key for key, of_key in given.items() if of_key is not None}
        for key in REASONING:  # an empty one is what a table holds where there is no thought
            if not str(message.get(key, "?")).strip():
                del message[key]
        if message.get("role") == "function":
            message["role"] = "tool"
        if "role" not in message:
            raise MalformedError(f"{where} holds {', '.join(message) or 'nothing'}, and no role")
        if (role := message["role"]) not in ROLES:
            raise MalformedError(f"{where}: unknown role {role!r}; it may be {', '.join(ROLES)}")
        if message.get("weight") not in (None, 0, 1):
            raise MalformedError(f"weight of {where} is {message['weight']!r}; it may be 0 or 1")
        if message.get("weight") and role != "assistant":
            raise MalformedError(f"weight of {where} is 1, and the {role}'s messages do not train; leave it out")
        if flags := [key for key in _TRAINS if key in message]:
            raise MalformedError(f"{where} says by {flags[0]!r} whether it trains; write weight, 0 or 1")
        if message.get("channel") in ("analysis", "commentary"):
            raise MalformedError(
                f"{where} is in gpt-oss's channel {message['channel']}, and would be an answer: write its text as "
                "thinking of the answer that follows, and calls as tool_calls"
            )
        calls = _calls_of(message, where)
        beside = _beside_text(message.get("content"), where)
        message = _with_thought(message, where)
        fields = {key: of_key for key, of_key in message.items() if key not in ("tool_calls", "function_call")} | beside
        content = _content_of(message, where)
        # An empty system message is common and harmless, so only the assistant's content may not be empty.
        if not (calls and not content) and (role == "assistant" or content != ""):
            checked_text(content, f"content of {where}")
        messages.append({**fields, "content": content or ""} | ({"tool_calls": calls} if calls else {}))
    if not any(message["role"] == "assistant" for message in messages):
        raise MalformedError("no message of the assistant, so nothing to train on")
    return messages


def _beside_text(content: Any, where: str) -> dict[str, Any]:
    """Return what the parts of a content hold beside their text, such as `cache_control`, as keys of the message that
    no chat template reads; raise `MalformedError` for a flag of what trains, which would hold for a part."""
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    texts = [part for part in parts if part.get("type") in (*_TEXT_PARTS, "thinking")]
    held = {key: value for part in texts for key, value in part.items() if value not in (None, "", [], {})}
    if flags := [key for key in ("weight", *_TRAINS) if key in held]:
        raise MalformedError(f"a part of {where} says by {flags[0]!r} whether it trains; only a whole message can")
    return {f"content.{key}": value for key, value in held.items() if key not in ("type", "text", "thinking")}


def _with_thought(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message with the thought in `reasoning_content` that the first parts of the assistant's content hold, of
    Anthropic's or Mistral's type `thinking`."""
    parts = message["content"] if isinstance(message.get("content"), list) and message["role"] == "assistant" else []
    thoughts = [*takewhile(lambda part: isinstance(part, dict) and part.get("type") == "thinking", parts)]
    if not thoughts:
        return message
    if any(message.get(key) for key in REASONING):
        raise MalformedError(f"{where} has one thought in its content and another beside it; keep one")
    texts = (_content_of({**message, "content": part.get("thinking")}, where) for part in thoughts)
    thought = "".join(checked_text(text, f"thinking of {where}") for text in texts)
    return {**message, "reasoning_content": thought, "content": parts[len(thoughts) :] or ""}


def _calls_of(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the calls of a message under `tool_calls` or, as one of an older kind, `function_call`."""
    calls, older = message.get("tool_calls") or [], message.get("function_call")
    if calls and older:
        raise MalformedError(f"{where} has tool_calls and function_call; keep one of them")
    calls = checked_calls([older] if older else calls, where)
    if calls and message["role"] != "assistant":
        raise MalformedError(f"{where} has tool_calls, and its role is {message['role']!r}; only the assistant calls")
    return calls


def _content_of(message: dict[str, Any], where: str) -> Any:
    """Return the content of a message with parts of text joined, and with the result of a tool as text; any other value
    as it is."""
    content, is_result = message.get("content"), message["role"] == "tool"
    if isinstance(content, list):
        types = [part.get("type") if isinstance(part, dict) else None for part in content]
        texts = [part.get("text") for part, type in zip(content, types, strict=True) if type in _TEXT_PARTS]
        if content and len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(texts)
        unread = [type for type in types if type not in _TEXT_PARTS and (type in _MEDIA_PARTS or not is_result)]
        if any(unread):
            raise MalformedError(
                f"{where} holds {shown(next(filter(None, unread)))}, and only text is read; leave the record out"
            )
        if not is_result:
            raise MalformedError(
                f'content of {where} is a list of other things than {{"type": "text", "text": …}}: {shown(content)}'
            )
    if is_result and content is not None and not isinstance(content, str):
        return json_text(content, f"content of {where}")
    return content


def _optional(record: dict[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str | None):
        raise MalformedError(f"{key} is {kind(value)}, not text")
    return (value or "").strip()
