"""Tool calls, results and descriptions, in other programs' spellings, as chat templates expect them.

    call    {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": {"city": "Oslo"}}}
    tool    {"type": "function", "function": {"name": "lookup", "description": .., "parameters": <JSON Schema>}}

In OpenAI's wire format, `arguments` is JSON text. Most templates write an object as JSON or in a syntax of their own,
and would write text as a quoted string; a few append text as it is, and would fail on an object, or write it as Python.
`fitted` finds out which of them a template is.
"""

import json
from collections.abc import Callable
from typing import Any

from moetune.errors import shown
from moetune.training.data.chats.marks import Messages, begun, marked, tried
from moetune.training.data.values import MalformedError, checked_list, checked_object, kind

Render = Callable[[Messages], str]
_ARGUMENTS = ("arguments", "parameters", "args")
"""Names of a call's arguments: OpenAI's, Llama's and LangChain's."""
_OF_CALL = ("id", "type", "index")
"""Keys of a call that stand beside `function`."""
_NO_ID = "no-id-of-call-"


def checked_calls(value: object, where: str) -> list[dict[str, Any]]:
    """Return the calls of a message, each as `{"type": "function", "function": {"name": …, "arguments": {…}}}`, with
    its other keys.

    Args:
        value: a list of calls, or the JSON text of one; a call may be JSON text, and lack `type` and `function`. Its
            arguments may be JSON text, and null, "" or missing if there are none.
        where: names the message in messages.

    Raises:
        MalformedError: `value` is something else; a call has no name, or is none of a function; or its arguments are
            no object or hold what JSON cannot represent.
    """
    calls = checked_list(value, f"tool_calls of {where}")
    return [_checked_call(call, f"call {number} of {where}") for number, call in enumerate(calls, 1)]


def _checked_call(value: object, where: str) -> dict[str, Any]:
    call = checked_object(value, where)
    if call.get("type") not in (None, "function", "tool_call"):
        raise MalformedError(f"{where} is of type {shown(call['type'])}, and only those of functions are read")
    beside = {key: given for key, given in call.items() if key in _OF_CALL} | {"type": "function"}
    if "function" in call:
        beside = {key: given for key, given in call.items() if key != "function"} | beside
        function = checked_object(call["function"], f"function of {where}")
    else:
        function = {key: given for key, given in call.items() if key not in _OF_CALL}
    name = _checked_name(function, where)
    names = [key for key in _ARGUMENTS if function.get(key) is not None]
    extra = {key: given for key, given in function.items() if key not in ("name", *_ARGUMENTS) and given is not None}
    if len(names) > 1 or (extra and not any(key in function for key in _ARGUMENTS)):
        raise MalformedError(f"{where} has {' and '.join(names or extra)}; write its arguments as arguments")
    arguments = function[names[0]] if names else {}
    if isinstance(arguments, str) and not arguments.strip():
        arguments = {}
    arguments = checked_object(arguments, f"arguments of {where}")
    return beside | {"function": {"name": name, "arguments": arguments, **extra}}


def checked_tools(value: object) -> list[dict[str, Any]] | None:
    """Return the tools of a chat, each as `{"type": "function", "function": {…}}`; None if there are none.

    Args:
        value: a list of tools, or the JSON text of one; a tool, or its parameters, may be JSON text, and a tool may
            lack `type` and `function`.

    Raises:
        MalformedError: `value` is something else; or a tool has no name, or is none of a function.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    tools = []
    for number, given in enumerate(checked_list(value, "tools"), 1):
        tool = checked_object(given, f"tool {number}")
        if tool.get("type") not in (None, "function"):
            raise MalformedError(f"tool {number} is of type {shown(tool['type'])}, and only functions are read")
        if "function" not in tool:
            tool = {"function": {key: of_tool for key, of_tool in tool.items() if key != "type"}}
        function = checked_object(tool["function"], f"function of tool {number}")
        _checked_name(function, f"tool {number}")
        if foreign := [key for key in ("input_schema", "inputSchema") if key in function]:
            raise MalformedError(f"tool {number} has {foreign[0]}; write it as parameters")
        if isinstance(function.get("parameters"), str):
            parameters = checked_object(function["parameters"], f"parameters of tool {number}")
            function = {**function, "parameters": parameters}
        tools.append({"type": "function", **tool, "function": function})
    return tools or None


def _checked_name(function: dict[str, Any], where: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        problem = f"{kind(name)} as name" if name is not None else "no name"
        raise MalformedError(f"{where} has {problem}; it holds {shown(function)}")
    return name


def fitted(messages: Messages, render: Render) -> Messages:
    """Return the messages with the arguments of calls as JSON text if the chat template needs that, and with ids by
    which a template finds the call that a result answers.

    A template needs text if it fails on objects, or writes them as Python does (`{'city': 'Oslo'}`).

    Args:
        messages: from `checked_messages`.
        render: returns messages as the template writes them. Its `UserError`, such as a time limit's, is passed on.

    Raises:
        MalformedError: the template writes ids, and a call or result has none; or it writes only some of the calls of
            a message.
    """
    calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]
    if not calls:
        return messages
    fit = as_objects = _linked(messages)
    written = tried(render, as_objects)
    # All calls of a chat are written alike, so one that looks different as Python and as JSON tells.
    python, text = next(((str(call), _as_text(call)) for call in calls if str(call) != _as_text(call)), ("", ""))
    if written is None or (python and python in written):
        as_text = [
            message | {"tool_calls": [_in_text(call) for call in message["tool_calls"]]}
            if "tool_calls" in message
            else message
            for message in as_objects
        ]
        quoted = tried(render, as_text)
        if quoted is not None and text in quoted and (written is None or written.count(python) > quoted.count(python)):
            fit, written = as_text, quoted
    if written is None:
        return as_objects  # the template refuses these again, in its own words
    if _NO_ID in written:
        raise MalformedError(
            "the chat template writes the ids of tool calls, and some have none: give each call an id, and its result "
            "the same as tool_call_id"
        )
    _refuse_lost_calls(fit, render)
    return fit


def refuse_lost_parameters(tools: list[dict[str, Any]] | None, text: str) -> None:
    """Raise `MalformedError` if a parameter of a tool is not in `text`, the rendered chat.

    Templates that write a syntax of their own look for the parameters where JSON Schema has them, in `properties`.
    """
    for tool in tools or ():
        parameters = tool["function"].get("parameters")
        if not isinstance(parameters, dict):
            continue
        # Without a `type`, the parameters themselves may stand where the schema belongs.
        properties = parameters.get("properties") or ({} if isinstance(parameters.get("type"), str) else parameters)
        schemas = sorted(name for name, schema in properties.items() if isinstance(schema, dict))
        if lost := [name for name in schemas if name not in text and json.dumps(name)[1:-1] not in text]:
            raise MalformedError(
                f"the chat template leaves out parameter {lost[0]!r} of the tool {tool['function']['name']!r}, which "
                'would be lost; write parameters as JSON Schema, {"type": "object", "properties": {…}}, or name a '
                "template that writes them in data.chat_template"
            )


def _as_text(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _in_text(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"function": call["function"] | {"arguments": _as_text(call["function"]["arguments"])}}


def _linked(messages: Messages) -> Messages:
    """Return the messages with an id for each call and each result that lacks one: the first result after a message
    answers its first call, and so on."""
    linked = list(messages)
    for at, message in enumerate(messages):
        if "tool_calls" not in message:
            continue
        given = [call.get("id") for call in message["tool_calls"]]
        calls: list[dict[str, Any]] = []
        follows = True  # whether there are only results between the message and the one at `index`
        for index, call in enumerate(message["tool_calls"], at + 1):
            result = messages[index] if index < len(messages) else {}
            follows = follows and result.get("role") == "tool"
            answers = follows and result.get("name") in (None, call["function"]["name"])
            named = result.get("tool_call_id") if answers else None
            id = call.get("id") or (named if named not in given else None) or f"{_NO_ID}{at}-{len(calls)}"
            calls.append({**call, "id": id})
            if answers and not named:
                linked[index] = {**result, "tool_call_id": id}
        linked[at] = {**message, "tool_calls": calls}
    return linked


def _refuse_lost_calls(messages: Messages, render: Render) -> None:
    """Raise `MalformedError` if the template writes some of a message's calls but not all, as gpt-oss's does."""
    if all(len(message.get("tool_calls", ())) < 2 for message in messages):
        return
    copies, texts = marked(messages)
    written = begun(tried(render, copies) or "")
    calls = {(text.message, text.call) for number, text in enumerate(texts) if number in written}
    for at, message in enumerate(messages):
        lost = [call for call in range(len(message.get("tool_calls", ()))) if (at, call) not in calls]
        if 0 < len(lost) < len(message.get("tool_calls", ())):
            raise MalformedError(
                f"the chat template leaves out call {lost[0] + 1} of message {at + 1}, which would be lost; give each "
                "call a message of its own, followed by its result"
            )
