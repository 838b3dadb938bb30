"""The token that ends a turn has loss, wherever a chat template puts it; nothing that others say has."""

import re
from collections import Counter
from itertools import groupby
from typing import Any

import pytest
from tokenizers import AddedToken

from moetune.training.data.chats.stop_tokens import turn_ends
from moetune.training.data.conversion import MalformedError
from moetune.training.data.documents import Document
from moetune.training.data.encoder import Encoder
from tests.chat_templates import NAMES, of_trl, tokenizer_with
from tests.training.data.test_load import CHATML

PLAIN: list[dict[str, Any]] = [
    {"role": "user", "content": "QUESTION1"},
    {"role": "assistant", "content": "ANSWER1"},
    {"role": "user", "content": "QUESTION2"},
    {"role": "assistant", "content": "ANSWER2"},
]
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "LOOKS", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"at": "ANSWER1"}}}
TOOL_CHAT: list[dict[str, Any]] = [
    PLAIN[0],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "RESULT", "tool_call_id": "call_1", "name": "look"},
    PLAIN[3],
]
ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>", "deepseek": "<｜end▁of▁sentence｜>", "gemma4": "<turn|>",
    "gemma": "<end_of_turn>", "diffusion_gemma": "<turn|>", "glm": "<|user|>", "gptoss": "<|return|>",
    "lfm2": "<|im_end|>",
    "llama3": "<|eot_id|>", "muse": "<|eot|>", "nemotron": "<|im_end|>", "phi3": "<|end|>", "qwen": "<|im_end|>",
}  # fmt: skip
"""First letters of a template's name -> the token that ends an answer."""
CALL_ENDS = {
    "gemma4_v2": "<turn|>", "gemma4": "<|tool_response>", "diffusion_gemma": "<|tool_response>",
    "glm": "<|observation|>", "gptoss": "<|call|>",
}  # fmt: skip
"""The same for the token that ends a tool call, if it is another."""
WITHOUT_TOOLS = ("cohere", "deepseek", "gemma3", "gemma_", "lfm2_training", "llama3_training", "phi3", "qwen2_5_vl")
IN_PARTS = ("idefics3", "llava_next", "smolvlm")
"""Templates that take content as a list of parts only."""
OTHER_PROMPT = {"deepseek_r1_distill", "deepseekv3"}
"""Templates whose generation prompt is not how a plain answer begins."""
STOPS = {*ENDS.values(), *CALL_ENDS.values()}


def end_of(name: str, ends: dict[str, str]) -> str | None:
    return next((end for beginning, end in ends.items() if name.startswith(beginning)), None)


def trained(tokenizer: Any, documents: list[Document]) -> list[str]:
    """The text of each stretch of tokens with loss."""
    stretches = []
    for document in documents:
        for has_loss, tokens in groupby(zip(document.ids, document.labels, strict=True), lambda pair: pair[1] >= 0):
            stretches += [tokenizer.decode([int(token) for token, _ in tokens])] if has_loss else []
    return stretches


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(IN_PARTS)])
def test_turns_of_trls_templates(name: str) -> None:
    tokenizer = tokenizer_with(of_trl(name))
    encoder, answer = Encoder(tokenizer, "chat"), end_of(name, ENDS)
    if name in OTHER_PROMPT:
        with pytest.raises(MalformedError, match="does not begin message 2 with its own generation prompt"):
            encoder.encode({"messages": PLAIN})
        return
    chats: list[tuple[dict[str, Any], list[str | None]]] = [({"messages": PLAIN}, [answer, answer])]
    if name == "gptoss_training":  # it marks the chat as it is read later, when the answer is history
        chats = [({"messages": PLAIN}, ["<|end|>", answer])]
    if not f"{name}_".startswith(WITHOUT_TOOLS) and name not in ("lfm2", "llama3"):
        for call in (TOOL_CHAT[1], TOOL_CHAT[1] | {"content": ""}, {k: v for k, v in TOOL_CHAT[1].items() if v}):
            record = {"messages": [TOOL_CHAT[0], call, *TOOL_CHAT[2:]], "tools": [TOOL]}
            chats.append((record, [end_of(name, CALL_ENDS) or answer, answer]))
    seen = set()
    for record, ends in chats:
        documents, written = encoder.encode(record)
        assert written is not None
        assert turn_ends(Counter(written.ends), STOPS | {"<|end|>"}) == dict(Counter(ends).most_common())
        stretches = trained(tokenizer, documents)
        assert [end in stretch for stretch, end in zip(stretches, ends, strict=True)] == [True, True]
        assert [re.findall("[A-Z]+[1-9]|RESULT|LOOKS", stretch) for stretch in stretches] == [["ANSWER1"], ["ANSWER2"]]
        for stretch, end in zip(stretches, ends, strict=True):
            assert stretch.removesuffix("\n").removesuffix("\n</s>").endswith(str(end)), stretch
        texts = "".join(text for text, _ in written.texts)
        assert "None" not in texts
        seen.add(texts)
    assert len(seen) == min(len(chats), 2)


CONTENT = "{{ m.content }}"
MARKED_CONTENT = (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}"
)
MARKED = CHATML.replace(CONTENT, MARKED_CONTENT)
OPEN_LAST = CHATML.replace("<|im_end|>\n", "{% if add_generation_prompt or not loop.last %}<|im_end|>\n{% endif %}")
OPEN = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
OPEN_MARKED = OPEN.replace(CONTENT, MARKED_CONTENT)
WORDS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ROLES = ("<|user|>", "<|assistant|>", "<|observation|>")


@pytest.mark.parametrize(
    ("template", "tokens", "expected", "end"),
    [
        (CHATML, (), ["ANSWER1<|im_end|>\n", "ANSWER2<|im_end|>\n"], "<|im_end|>"),
        (MARKED, (), ["ANSWER1<|im_end|>", "ANSWER2<|im_end|>"], "<|im_end|>"),
        (OPEN_LAST, (), ["ANSWER1<|im_end|>", "ANSWER2<|im_end|>"], "<|im_end|>"),
        (OPEN, ROLES, ["ANSWER1<|user|>", "ANSWER2<|user|>"], "<|user|>"),
        (OPEN_MARKED, ROLES, ["ANSWER1<|user|>", "ANSWER2<|user|>"], "<|user|>"),
        (OPEN.replace("<|", "<role>").replace("|>", "</role>"), ["<role>", "</role>"],
         ["ANSWER1<role>", "ANSWER2<role>"], "<role>"),
        (WORDS, (), ["ANSWER1\n\n", "ANSWER2\n\n"], ""),
        (OPEN, (), ["ANSWER1", "ANSWER2"], ""),
        (CHATML.replace("|im_", "*im_"), (), ["ANSWER1<*im_end|>\n", "ANSWER2<*im_end|>\n"], ""),
    ],
    ids=["own", "outside of the markers", "not at the last turn", "next role", "next role, marked", "part of a role",
         "words", "no tokens", "words of another tokenizer"],
)  # fmt: skip
def test_the_end_is_found_where_the_template_puts_it(
    template: str, tokens: tuple[str, ...], expected: list[str], end: str
) -> None:
    tokenizer = tokenizer_with(template, tokens)
    documents, written = Encoder(tokenizer, "chat").encode({"messages": PLAIN})
    assert written is not None
    assert trained(tokenizer, documents) == expected
    assert turn_ends(Counter(written.ends), ()) == {end: 2}


@pytest.mark.parametrize(("name", "end"), [("qwen3", "<|im_end|>"), ("glm4moe", "<|user|>"), ("gptoss", "<|return|>")])
def test_an_answer_that_spells_the_end_of_its_turn_is_refused(name: str, end: str) -> None:
    """It would train the model to write it twice; within a text it is what it spells."""
    encoder = Encoder(tokenizer_with(of_trl(name)), "chat")
    with pytest.raises(MalformedError, match=f"an answer ends with {re.escape(end)}, which the template adds"):
        encoder.encode({"messages": [PLAIN[0], {"role": "assistant", "content": f"yes{end}"}]})
    assert encoder.encode({"messages": [PLAIN[0], {"role": "assistant", "content": f"{end} ends it"}]})


def test_the_last_turn_ends_as_if_another_message_followed() -> None:
    """GLM drops earlier reasoning, so that each turn is a document, and the last of it has no token after it."""
    tokenizer = tokenizer_with(of_trl("glm4moe"))
    thought = [message | ({"reasoning_content": "WHY"} if number % 2 else {}) for number, message in enumerate(PLAIN)]
    documents, _ = Encoder(tokenizer, "chat").encode({"messages": thought})
    assert trained(tokenizer, documents) == [f"\n<think>WHY</think>\nANSWER{turn}<|user|>" for turn in (1, 2)]
    documents, _ = Encoder(tokenizer, "chat").encode({"messages": [*PLAIN[:3], PLAIN[3] | {"weight": 0}]})
    assert trained(tokenizer, documents) == ["\nANSWER1<|user|>"]


@pytest.mark.parametrize(("template", "end"), [(MARKED, "<|im_end|>"), (OPEN, "<|user|>")])
def test_a_control_token_may_hold_the_white_space_after_it(template: str, end: str) -> None:
    """As those of Phi-3 do."""
    names = ("<|im_start|>", "<|im_end|>", *ROLES)
    tokens = [AddedToken(name, rstrip=True, normalized=False, special=True) for name in names]
    tokenizer = tokenizer_with(template, tokens)
    documents, _ = Encoder(tokenizer, "chat").encode({"messages": PLAIN})
    assert trained(tokenizer, documents) == [f"ANSWER1{end}", f"ANSWER2{end}"]
