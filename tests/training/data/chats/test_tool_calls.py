"""Tool calls in the spellings that people bring, trained as chat templates write them from clean objects."""

import copy
import json
from pathlib import Path

import pytest
import trl

from moetune.errors import UserError
from moetune.training.data.conversion import with_known_keys
from moetune.training.data.encoder import Encoder, format_of
from tests.training.data.test_load import CHATML, make_tokenizer, trained_text

ARGUMENTS = {
    "where": {"city": "Åså", "zip": "01"},
    "days": 2,
    "exact": True,
    "at": [59.5, 1e22],
    "unit": None,
    "q": "a'\"\n",
}
PARAMETERS = {"type": "object", "properties": {name: {"type": "string", "description": "d"} for name in ARGUMENTS}}
TOOL = {"type": "function", "function": {"name": "lookup", "description": "looks up", "parameters": PARAMETERS}}
CALL = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": ARGUMENTS}}
ASKED, TOLD = {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "Three degrees."}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "lookup", "content": '{"temp": 3}'}


def templated(name):
    return make_tokenizer((Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text())


def encoded(tokenizer, record):
    """The text of each document, and the text of it that is trained on."""
    record = with_known_keys(copy.deepcopy(record))
    documents, _ = Encoder(tokenizer, format_of(record)).encode(record)
    return [(tokenizer.decode(d.ids), trained_text(tokenizer, d.ids, d.labels)) for d in documents]


def refusal(tokenizer, record):
    with pytest.raises(UserError) as caught:
        encoded(tokenizer, record)
    return str(caught.value)


def chat(call=CALL, said=(), result=RESULT, **record):
    """A record in which the assistant makes a call, of which `said` are further keys of the message."""
    calling = {"role": "assistant", "content": "", "tool_calls": [call], **dict(said)}
    messages = [ASKED, {key: value for key, value in calling.items() if value is not ...}, result, TOLD]
    return {"messages": messages, "tools": [TOOL]} | record


def call_of(**function):
    return {**CALL, "function": {"name": "lookup", **function}}


LEGACY = {"content": None, "tool_calls": ..., "function_call": {"name": "lookup", "arguments": json.dumps(ARGUMENTS)}}
SPELLINGS = {
    "arguments as text": chat(call_of(arguments=json.dumps(ARGUMENTS))),
    "arguments as indented text": chat(call_of(arguments=f" {json.dumps(ARGUMENTS, indent=2, ensure_ascii=False)}\n")),
    "no id": chat({"type": "function", "function": CALL["function"]}, result={**RESULT, "tool_call_id": None}),
    "no id of the call": chat({"type": "function", "function": CALL["function"]}),
    "no type": chat({"id": "c1", "function": CALL["function"]}),
    "flat": chat({"name": "lookup", "arguments": ARGUMENTS, "id": "c1"}),
    "flat, Llama's": chat({"name": "lookup", "parameters": json.dumps(ARGUMENTS), "id": "c1"}),
    "flat, LangChain's": chat({"name": "lookup", "args": ARGUMENTS, "id": "c1", "type": "tool_call"}),
    "a call as text": chat(json.dumps(CALL)),
    "calls as text": chat(said={"tool_calls": json.dumps([CALL])}),
    "function_call": chat(said=LEGACY, result={"role": "function", "name": "lookup", "content": '{"temp": 3}'}),
    "content null": chat(said={"content": None}),
    "content missing": chat(said={"content": ...}),
    "keys of other messages": chat(said={"function_call": None, "refusal": None, "name": None}),
    "content in parts": chat(
        result={**RESULT, "content": [{"type": "text", "text": '{"temp"'}, {"type": "text", "text": ": 3}"}]}
    ),
    "result as object": chat(result={**RESULT, "content": {"temp": 3}}),
    "tools as text": chat(tools=json.dumps([TOOL])),
    "tools as texts": chat(tools=[json.dumps(TOOL)]),
    "tools flat": chat(tools=[TOOL["function"]]),
    "tools flat, with type": chat(tools=[{"type": "function", **TOOL["function"]}]),
    "functions": chat(tools=None, functions=[TOOL["function"]]),
    "tools of a rollout": {**chat(tools=None), "tool_defs": [TOOL["function"]]},
    "parameters as text": chat(
        tools=[{**TOOL, "function": {**TOOL["function"], "parameters": json.dumps(PARAMETERS)}}]
    ),
    "all as text": {
        "messages": json.dumps(chat(call_of(arguments=json.dumps(ARGUMENTS)))["messages"]),
        "tools": json.dumps([TOOL]),
    },
}
TEMPLATES = (
    "qwen2_5", "gptoss", "gemma4", "glm4moe_training", "llama3_1", "lfm2_v2_training", "nemotron_3_nano_training",
    "muse_glimmer", "qwen3_8_training", "gemma4_v5",
)  # fmt: skip


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_spelling_of_a_call_trains_what_the_template_writes_from_objects(name):
    tokenizer = templated(name)
    clean = chat()
    expected = encoded(tokenizer, clean)
    assert expected[-1][0] == tokenizer.apply_chat_template(clean["messages"], clean["tools"], tokenize=False)
    assert "Åså" in "".join(trained for _, trained in expected)
    for spelling, record in SPELLINGS.items():
        assert encoded(tokenizer, record) == expected, spelling


APPENDS = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.type + c.function.name + ARGUMENTS }}</call>"
    "{% endfor %}",
)


@pytest.mark.parametrize(
    "template",
    [
        APPENDS.replace("ARGUMENTS", arguments)
        for arguments in ("c.function.arguments", "(c.function.arguments | string)")
    ]
    + [APPENDS.replace("ARGUMENTS", "(c.function.arguments | tojson)")],
    ids=["appends", "prints", "tojson"],
)
def test_a_template_that_appends_arguments_gets_text(template):
    """DeepSeek-V3's appends, and fails on an object; others would print `{'where': …}`."""
    tokenizer = make_tokenizer(template)
    for asked in (ASKED, {**ASKED, "content": f"{ARGUMENTS}"}):
        for arguments in (ARGUMENTS, json.dumps(ARGUMENTS), json.dumps(ARGUMENTS, indent=1)):
            record = chat(call_of(arguments=arguments), tools=None)
            record["messages"][0] = asked
            ((_, trained),) = encoded(tokenizer, record)
            written = json.dumps(ARGUMENTS, ensure_ascii=False)
            assert trained == f"<call>functionlookup{written}</call><|im_end|>\nThree degrees.<|im_end|>\n"
    for none in (None, "", "{}", {}):
        ((_, trained),) = encoded(tokenizer, chat(call_of(arguments=none), tools=None))
        assert trained.startswith("<call>functionlookup{}</call>")


@pytest.mark.parametrize("name", ["qwen2_5", "gemma4", "llama3_1", "glm4moe_training", "gptoss"])
def test_sharegpt_calls_are_calls(name):
    tokenizer = templated(name)
    function = {"name": "lookup", "arguments": ARGUMENTS}
    for caller, called, answered in (
        ("function_call", json.dumps(function), "observation"),
        ("tool_call", [function], "tool_response"),
        ("function_call", json.dumps([{"name": "lookup", "arguments": json.dumps(ARGUMENTS)}]), "function_response"),
    ):
        turns = [("human", "Weather?"), (caller, called), (answered, '{"temp": 3}'), ("gpt", "Three degrees.")]
        conversation = [{"from": speaker, "value": value} for speaker, value in turns]
        for written in (conversation, json.dumps(conversation)):
            assert encoded(tokenizer, {"conversations": written, "tools": json.dumps([TOOL])}) == encoded(
                tokenizer, chat()
            )


def test_what_stands_in_the_text_already_stays():
    """Hermes' data have calls as text in the syntax of their template."""
    said = '<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>'
    conversation = [{"from": "human", "value": "Weather?"}, {"from": "gpt", "value": said}]
    tokenizer = templated("qwen2_5")
    assert encoded(tokenizer, {"conversations": conversation})[0][1] == f"{said}<|im_end|>\n"
    thought = "<think>why</think>" + json.dumps(CALL["function"])
    conversation[1] = {"from": "function_call", "value": thought}
    (trained,) = (trained for _, trained in encoded(tokenizer, {"conversations": conversation}))
    assert trained.startswith('<think>why</think>\n<tool_call>\n{"name": "lookup", "arguments": {"where"')


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (call_of(arguments="[1]"), "arguments of call 1 of message 2 is a list ([1]), not an object"),
        (call_of(arguments=True), "arguments of call 1 of message 2 is a boolean (True), not an object"),
        (call_of(arguments="{'city': 'Oslo'}"), "arguments of call 1 of message 2 is text and not valid JSON"),
        (call_of(arguments='{"a": 1, "a": 2}'), "the key 'a' appears more than once"),
        (call_of(arguments='{"a": 1e400}'), "arguments of call 1 of message 2 cannot be written as JSON"),
        (call_of(arguments='{"a": ' + "9" * 5000 + "}"), "arguments of call 1 of message 2 is text and not valid JSON"),
        (call_of(arguments={"a": float("inf")}), "call 1 of message 2 cannot be written as JSON"),
        (call_of(arguments=ARGUMENTS, parameters={}), "call 1 of message 2 has arguments and parameters"),
        (call_of(kwargs=ARGUMENTS), "call 1 of message 2 has kwargs; write its arguments as arguments"),
        ({"function": {"arguments": {}}}, "call 1 of message 2 has no name"),
        ({"name": 3, "arguments": {}}, "call 1 of message 2 has a number as name"),
        ({"type": "custom", "custom": {"name": "x"}}, "call 1 of message 2 is of type 'custom'"),
        ("lookup()", "call 1 of message 2 is text and not valid JSON, 'lookup()'"),
    ],
)
def test_a_call_that_is_none_is_named(call, said):
    assert said in refusal(templated("qwen2_5"), chat(call))


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (chat(tools={"lookup": TOOL}), "tools is an object, not a list"),
        (chat(tools=["lookup"]), "tool 1 is text and not valid JSON, 'lookup'"),
        (chat(tools=[TOOL, {"type": "web_search"}]), "tool 2 is of type 'web_search'"),
        (chat(tools=[{"description": "looks"}]), "tool 1 has no name; it holds {'description': 'looks'}"),
        (chat(tools=[{"name": "lookup", "input_schema": {}}]), "tool 1 has input_schema; write it as parameters"),
        (chat(functions=[TOOL["function"]]), "tools are given twice: as tools and as functions"),
        (chat(said={"function_call": CALL["function"]}), "message 2 has tool_calls and function_call"),
        (chat(said={"tool_calls": CALL}), "tool_calls of message 2 is an object, not a list"),
        (chat(said={"role": "user"}), "message 2 has tool_calls, and its role is 'user'"),
        (chat(result={**RESULT, "content": None}), "content of message 3 is null"),
        (chat(result={**RESULT, "content": [{"type": "image_url"}]}), "message 3 holds 'image_url'"),
        (
            {"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "lookup(x)"}]},
            "function_call of turn 2 is text and not valid JSON, 'lookup(x)'",
        ),
    ],
)
def test_tools_and_results_that_are_none_are_named(record, said):
    assert said in refusal(templated("qwen2_5"), record)


def test_no_calls_are_no_key():
    """DeepSeek's and Llama's templates ask whether there is the key."""
    tokenizer = templated("llama3_1")
    for none in ([], None, "[]"):
        record = {"messages": [ASKED, {**TOLD, "tool_calls": none}]}
        assert encoded(tokenizer, record) == encoded(tokenizer, {"messages": [ASKED, TOLD]})


# In the manner of Kimi-K2's template: the id of a call is part of what the model writes.
IDS = APPENDS.replace("ARGUMENTS", "(c.id ~ (c.function.arguments | tojson))")


def test_ids_that_the_template_writes_are_not_invented():
    tokenizer = make_tokenizer(IDS)
    assert "lookupc1{" in encoded(tokenizer, chat(tools=None))[0][1]
    nameless = {"type": "function", "function": CALL["function"]}
    assert "lookupc1{" in encoded(tokenizer, chat(nameless, tools=None))[0][1]  # the result has it
    without = chat(nameless, result={**RESULT, "tool_call_id": None}, tools=None)
    assert "give each call an id, and its result the same as tool_call_id" in refusal(tokenizer, without)


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v5", "muse_glimmer"])
def test_results_without_ids_are_those_of_the_calls_in_their_order(name):
    tokenizer, calls, results = templated(name), [], []
    for number, function in enumerate(("lookup", "search")):
        calls.append(
            {"id": f"c{number}", "type": "function", "function": {"name": function, "arguments": {"n": number}}}
        )
        results.append({"role": "tool", "tool_call_id": f"c{number}", "content": f"result {number}"})
    clean = {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": calls}, *results, TOLD]}
    bare = copy.deepcopy(clean)
    for item in (*bare["messages"][1]["tool_calls"], *bare["messages"][2:4]):
        item.pop("id", item.pop("tool_call_id", None))
    written = tokenizer.apply_chat_template(clean["messages"], tokenize=False)
    assert encoded(tokenizer, bare) == encoded(tokenizer, clean)
    assert encoded(tokenizer, bare)[-1][0] == written
    swapped = {"messages": [*clean["messages"][:2], *results[::-1], TOLD]}
    assert encoded(tokenizer, swapped)[-1][0] == tokenizer.apply_chat_template(swapped["messages"], tokenize=False)


def test_calls_that_the_template_leaves_out_are_named():
    """gpt-oss's template writes the first call of a message only."""
    twice = chat(said={"tool_calls": [CALL, {**CALL, "id": "c2"}]})
    assert "leaves out call 2 of message 2" in refusal(templated("gptoss"), twice)
    trained = "".join(trained for _, trained in encoded(templated("qwen2_5"), twice))
    assert trained.count("<tool_call>") == 2


def test_parameters_where_the_template_does_not_look_are_named():
    """xLAM's parameters have no `properties`: gpt-oss's template would write a tool without parameters."""
    record = {
        "query": "Weather?",
        "tools": json.dumps([{"name": "lookup", "description": "d", "parameters": {"town": {"type": "str"}}}]),
        "answers": json.dumps([{"name": "lookup", "arguments": {"town": "Oslo"}}]),
    }
    ((written, trained),) = encoded(templated("qwen2_5"), record)
    assert '{"name": "lookup", "description": "d", "parameters": {"town": {"type": "str"}}}' in written
    assert trained == '<tool_call>\n{"name": "lookup", "arguments": {"town": "Oslo"}}\n</tool_call><|im_end|>\n'
    record["answers"] = record["answers"].replace("town", "city")
    assert "leaves out parameter 'town' of the tool 'lookup'" in refusal(templated("gptoss"), record)
