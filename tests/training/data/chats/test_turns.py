"""Chats of an agent: few renderings however many turns, and the same texts as if each turn's chat were rendered."""

import random
import time
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moetune.training.data.chats import chat_template
from moetune.training.data.chats.chat_template import ChatTemplate
from moetune.training.data.conversion import MalformedError
from tests.chat_templates import of_trl, tokenizer_with

TOOL = {
    "type": "function",
    "function": {"name": "bash", "description": "runs", "parameters": {"type": "object", "properties": {}}},
}
# Writes the ids of calls, as Kimi-K2 does, and of the calls themselves only the arguments.
IDS = (
    "{{ tools or '' }}"
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}<|call|>{{ call.id }}"
    "<|argument|>{{ call.function.arguments | tojson }}{% endfor %}{% if m.role == 'tool' %}<|of|>{{ m.tool_call_id }}"
    "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
)
# Writes the last turn with another end, from the third on.
LATER = (
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and loop.index0 > 5 and m.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
)


def agent(calls: int, seed: int = 0, **more: Any) -> list[dict[str, Any]]:
    """A chat with tool calls; their ids, numbers and results differ, and what is said or answered may be empty."""
    draw = random.Random(seed)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    for number in range(calls):
        call_id = f"functions.bash:{number}-{draw.getrandbits(draw.choice((8, 60))):x}"
        arguments = {"command": f"sed -n {number},{number + 40}p a.py", "wait": draw.choice((1, 20.5, 3e6))}
        call = {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}
        said = f"Step {number}: 12 and <b>bash</b>." if number % 2 else ""
        messages.append({"role": "assistant", "content": said, "tool_calls": [call], **more})
        result = f"x = {number}\n" * (number % 3)
        messages.append({"role": "tool", "content": result, "tool_call_id": call_id, "name": "bash"})
    return [*messages, {"role": "assistant", "content": "Done."}]


def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(tokenizer_with({"ids": IDS, "later": LATER}.get(name) or of_trl(name)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "lfm2_2_5", "ids"])
def test_renderings_do_not_grow_with_the_number_of_turns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    renderings = []

    def counting(*args: Any, **options: Any) -> Any:
        renderings.append(args)
        return render_jinja_template(*args, **options)

    monkeypatch.setattr(chat_template, "render_jinja_template", counting)
    counts = []
    for calls in (30, 120):
        renderings.clear()
        written = template_of(name).write(agent(calls, **({"reasoning": "why"} if name == "qwen3" else {})), [TOOL])
        assert (len(written.texts), len(written.ends)) == (1, calls + 1)
        counts.append(len(renderings))
    assert counts[0] == counts[1] <= 50


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["qwen3", "lfm2_v2", "gemma4", "qwen3_8", "ids", "later"])
def test_turns_are_where_rendering_each_would_find_them(name: str, seed: int) -> None:
    template, draw = template_of(name), random.Random(seed)
    messages = [*agent(draw.randrange(9), seed), *agent(9, seed + 9)[1:], {"role": "user", "content": "bye"}]
    tools = None if name == "later" else [TOOL]
    if name == "later":
        messages = [{**message, "content": message["content"] or "1"} for message in messages]
        for message in messages:
            message.pop("tool_calls", None)
    expected: list[tuple[str, list[tuple[int, int]]]] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before, _ = template._render(messages[:index], tools, prompt=True)
            text, _ = template._render(messages[: index + 1], tools)
            begin = template._thinking.begin(before, text)
            assert begin is not None
            spans = [(begin, len(text))]
            if expected and text.startswith(expected[-1][0]):
                spans = expected.pop()[1] + spans
            expected.append((text, spans))
    full, _ = template._render(messages, tools)
    if full.startswith(expected[-1][0]):
        expected[-1] = full, expected[-1][1]
    expected = [(text, template._thinking.trained(text, spans)[0]) for text, spans in expected]
    assert template.write(messages, tools).texts == expected
    assert (len(expected) > 1) == (name in ("qwen3", "gemma4", "later"))


def test_time_is_limited_for_a_rendering_and_not_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    template, render = template_of("qwen3"), render_jinja_template

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return render(*args, **options)

    monkeypatch.setattr(chat_template, "render_jinja_template", slow)
    monkeypatch.setattr(chat_template, "_SECONDS", 0.2)
    assert len(template.write(agent(9), [TOOL]).ends) == 10


def test_what_one_of_several_turns_lacks_is_named() -> None:
    messages = agent(3)
    # This template writes the function's name only in ids.
    messages[2]["tool_calls"][0]["id"] = messages[3]["tool_call_id"] = "call_7"
    with pytest.raises(MalformedError, match="leaves out 'bash' in tool_calls of message 3"):
        template_of("ids").write(messages, [TOOL])
    marked = template_of("nemotron_3_nano_training")  # drops the reasoning of all but the last, and writes <think>
    thought = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "BECAUSE"}]
    with pytest.raises(MalformedError, match="leaves out 'BECAUSE' in reasoning_content of message 2"):
        marked.write(thought * 2, None)
    assert "BECAUSE" in marked.write(thought, None).texts[0][0]
