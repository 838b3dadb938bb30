"""Render chats as text with the tokenizer's chat template, and find the characters that the assistant wrote."""

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from moetune.errors import UserError, one_line, time_limit
from moetune.training.data.formats import MalformedError, checked_text, lost_content
from moetune.training.data.thinking import Thinking, placed

_SECONDS, _BYTES = 10.0, 2**30  # limits of time and memory for rendering one record
_MAY_BE_IGNORED = (("tool_calls",), ("function_call",), ("reasoning_content", "reasoning", "thinking"), ("name",))
"""Keys of a message that some templates ignore; each tuple lists alternative names of one key."""
Marking = Literal["markers", "prompts", "turns"]
MARKINGS: dict[Marking, str] = {
    "markers": "the assistant's part is what the chat template marks with {% generation %}",
    "prompts": "the assistant's part is what follows the chat template's generation prompts",
    "turns": "the chat template writes earlier turns differently, so that each turn of the assistant is a document of "
    "its own, as it stands last; its part is what follows the generation prompt",
}
"""The ways to find the assistant's text in a rendered chat, each with an explanation for the user."""
_ANOTHER = "name one in data.chat_template (a chat_template.jinja) that does, or that has {% generation %} markers"
Spanned = tuple[str, list[tuple[int, int]]]
"""A text, and the [start, end) character ranges of it that are trained on."""
Messages = list[dict[str, Any]]
Tools = list[Any] | None


class ChatTemplate:
    """The chat template of a tokenizer.

    Raises:
        UserError: the tokenizer has no usable chat template, or is not a fast one: only these return the character
            offsets by which tokens are assigned to the assistant.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise UserError(
                "the tokenizer has no chat template, so chat messages have no written form; "
                "name a file or a model with one in data.chat_template, or give the data as text or prompt and "
                "completion"
            )
        if not tokenizer.is_fast:
            raise UserError("chat data needs a tokenizer with offsets (a tokenizer.json file); this one has none")
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:  # several named templates, and none is the default
            raise UserError(f"the tokenizer's chat template cannot be used: {error}") from None
        self._tokenizer = tokenizer
        self._template = template
        self.thinking = Thinking(template, lambda *chat, **options: self._render(*chat, **options)[0])
        self._has_markers = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None

    def write(self, messages: Messages, tools: Tools) -> tuple[list[Spanned], Marking]:
        """Render a chat; return its texts, each with the [start, end) character ranges to train on, and how these were
        found, a key of `MARKINGS`.

        A chat becomes several texts if the template writes earlier turns differently from the last one.

        Args:
            messages: from `checked_messages`.
            tools: descriptions of the tools that the assistant may call; None for no tools.

        Raises:
            MalformedError: the template raises an error, leaves out part of the chat, or exceeds 10 s or 1 GiB.
        """
        try:
            messages = placed(messages, self._template)
            self.thinking.refuse_unclosed(messages)
            messages = self._with_content(messages, tools)
            self._refuse_ignored(messages, tools)
            self._refuse_lost_content(messages, tools)
            if self._has_markers:
                text, spans = self._render(messages, tools)
                texts = [(text, _weighted(messages, spans))]
            else:
                texts = self._turns(messages, tools)
            texts = [(text, self.thinking.trained(text, spans)) for text, spans in texts]
        except UserError as error:
            raise MalformedError(str(error)) from None
        except Exception as error:  # template code can raise any exception
            raise MalformedError(f"the chat template refuses it: {one_line(error)}") from None
        for text, _ in texts:
            if not isinstance(text, str) or len(text) > _BYTES // 16:
                raise MalformedError("the chat template's output exceeds the memory limit")
            checked_text(text, "rendered chat")
        return texts, "markers" if self._has_markers else "prompts" if len(texts) == 1 else "turns"

    def _render(self, messages: Messages, tools: Tools, *, prompt: bool = False, **arguments: Any) -> Spanned:
        """Return a chat as the template writes it, and the character ranges of its `{% generation %}` blocks.

        This is the only place where the template is run, and what transformers' `apply_chat_template` does: keys of
        null are left out. `prompt` appends the generation prompt; `arguments` replace those of `data.template`.

        Raises:
            UserError: the template takes more than `_SECONDS`.
            MemoryError: it takes more than `_BYTES` of memory, on systems with /proc.
        """
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        options = {**self._tokenizer.special_tokens_map, **arguments}
        with _bounded():
            rendered: Any = render_jinja_template(
                [chat],
                tools,
                chat_template=self._tokenizer.get_chat_template(tools=tools),
                return_assistant_tokens_mask=self._has_markers,
                add_generation_prompt=prompt,
                **options,
            )
        (text,), spans = rendered
        return text, [(low, high) for low, high in spans[0]] if self._has_markers else []

    def _with_content(self, messages: Messages, tools: Tools) -> Messages:
        """Return the messages, with "" for contents of None if the template would otherwise write `None` or fail."""
        if all(message["content"] is not None for message in messages):
            return messages
        empty = [{**message, "content": message["content"] or ""} for message in messages]
        try:
            written = self._render(messages, tools)[0]
        except UserError:  # the time limit
            raise
        except Exception:
            return empty
        return empty if written.count("None") > self._render(empty, tools)[0].count("None") else messages

    def _refuse_ignored(self, messages: Messages, tools: Tools) -> None:
        """Raise `MalformedError` if the template ignores the tools, the text before `</think>`, or a key of a message
        (`_MAY_BE_IGNORED`).

        A part is ignored if the rendered text is the same without it. If the template has no `{% generation %}`
        markers, the chat is cut after the assistant's next turn for this test, as `_turns` cuts it for training.
        """
        cases: list[tuple[str, int, dict[str, Any] | None]] = []  # (part, message index, message without the part)
        for at, message in enumerate(messages):
            for names in _MAY_BE_IGNORED:
                # The name in a tool's message is also in the call that it answers, so it may be ignored.
                here = [name for name in names if message.get(name) and (name, message["role"]) != ("name", "tool")]
                if here:
                    left = {key: value for key, value in message.items() if key not in here}
                    cases.append((f"{here[0]} of message {at + 1}", at, left))
            thought, mark, answer = (message["content"] or "").rpartition("</think>")
            if mark and thought.strip() and message["role"] == "assistant":
                cases.append((f"the text before </think> in message {at + 1}", at, {**message, "content": answer}))
        if tools:
            cases.insert(0, ("tools", len(messages) - 1, None))
        for what, at, without in cases:
            turns = (end for end, one in enumerate(messages, 1) if end > at and one["role"] == "assistant")
            end = len(messages) if self._has_markers else next(turns, len(messages))
            full = self._render(messages[:end], tools)[0]
            try:
                if without is None:
                    fewer = self._render(messages, None)[0]
                else:
                    fewer = self._render([*messages[:at], without, *messages[at + 1 : end]], tools)[0]
            except UserError:  # the time limit
                raise
            except Exception:  # the template fails without it, so it is not ignored
                continue
            if fewer == full:
                raise _left_out(what)

    def _refuse_lost_content(self, messages: Messages, tools: Tools) -> None:
        """Raise `MalformedError` if the template drops some of a message's content.

        If the template has no `{% generation %}` markers, content also counts as kept if it appears in the chat cut
        after any turn of the assistant, because `_turns` trains on such cuts.
        """
        lost = lost_content(messages, lambda some: self._render(some, tools)[0])
        for end, message in enumerate(messages, 1):
            if not lost or self._has_markers:
                break
            if message["role"] == "assistant" and min(lost) < end < len(messages):
                in_turn = lost_content(messages[:end], lambda some: self._render(some, tools)[0])
                lost = {at: what for at, what in lost.items() if at >= end or at in in_turn}
        for what in lost.values():
            raise _left_out(what)

    def _turns(self, messages: Messages, tools: Tools) -> list[Spanned]:
        """Render a chat up to each turn of the assistant, for a template without `{% generation %}` markers.

        The assistant's range begins where the preceding messages, rendered with a generation prompt, end. If one text
        is the beginning of the next, only the longer one is returned, with the ranges of both.

        Raises:
            MalformedError: the first message is the assistant's, or a turn does not begin with its generation prompt.
        """
        texts: list[Spanned] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if index == 0:
                raise MalformedError(
                    "the assistant speaks first, and without {% generation %} markers in the chat template "
                    "nothing shows where its part begins"
                )
            before = self._render(messages[:index], tools, prompt=True)[0]
            after = self._render(messages[: index + 1], tools)[0]
            if (begin := self.thinking.begin(before, after)) is None:
                remedy = self.thinking.remedy(messages[: index + 1], tools)
                raise MalformedError(
                    f"the chat template does not begin message {index + 1} with its own generation prompt, which ends "
                    f"in {before[-30:]!r}, so what is the assistant's cannot be told; {remedy or _ANOTHER}"
                )
            spans = [(begin, len(after))] if message.get("weight", 1) else []
            if texts and after.startswith(texts[-1][0]):
                spans = texts.pop()[1] + spans
            texts.append((after, spans))
        full = self._render(messages, tools)[0]
        if full.startswith(texts[-1][0]):
            texts[-1] = full, texts[-1][1]
        return texts


def _left_out(what: str) -> MalformedError:
    return MalformedError(
        f"the chat template leaves out {what}, which would be lost; name a template that writes it in "
        "data.chat_template, or take it out of the record"
    )


def _weighted(messages: Messages, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the assistant's character ranges without those of messages whose `weight` is 0.

    Raises:
        MalformedError: a weight is 0, and there are more or fewer ranges than messages of the assistant.
    """
    weights = [message.get("weight", 1) for message in messages if message["role"] == "assistant"]
    if all(weights):
        return spans
    if len(weights) != len(spans):
        raise MalformedError(
            f"weight: 0 cannot be applied: the chat template marks {len(spans)} parts for {len(weights)} messages "
            "of the assistant"
        )
    return [span for span, weight in zip(spans, weights, strict=True) if weight]


@contextmanager
def _bounded() -> Iterator[None]:
    """Limit the time of the `with` block (`UserError`) and, on systems with /proc, its memory (`MemoryError`)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit, statm = soft, Path("/proc/self/statm")
    if statm.is_file():
        wanted = int(statm.read_text().split()[0]) * resource.getpagesize() + _BYTES
        limit = wanted if soft == resource.RLIM_INFINITY else min(soft, wanted)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        with time_limit("the chat template", _SECONDS):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
