"""Render chats with the tokenizer's chat template, and find what the assistant wrote."""

import re
import resource
from collections import defaultdict
from collections.abc import Collection, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from moetune.errors import UserError, one_line, time_limit
from moetune.training.data.chats.marks import (
    REASONING,
    Layout,
    Messages,
    Text,
    marked,
    missing_word,
    tried,
    unmarked_from,
)
from moetune.training.data.chats.template_arguments import reads
from moetune.training.data.chats.thinking import Thinking, placed
from moetune.training.data.chats.tool_calls import fitted, refuse_lost_parameters
from moetune.training.data.chats.turn_ends import Spanned, TurnEnds
from moetune.training.data.chats.turns import TurnFinder
from moetune.training.data.values import MalformedError, checked_text

_SECONDS, _BYTES = 10.0, 2**30  # limits of time and memory for rendering a chat once
_MAY_BE_IGNORED = (("tool_calls",), REASONING, ("name",))
"""Keys of a message that some templates ignore; each tuple lists alternative names of one key."""
_READ = {"role", "content", "weight", *(name for names in _MAY_BE_IGNORED for name in names), "tool_call_id"}
"""Keys of a message that are read, or that are refused if the template ignores them; a result's id repeats a call's."""
Marking = Literal["markers", "prompts", "turns"]
MARKINGS: dict[Marking, str] = {
    "markers": "the assistant's part is what the chat template marks with {% generation %}",
    "prompts": "the assistant's part is what follows the chat template's generation prompts",
    "turns": "the chat template writes earlier turns differently, so that each turn of the assistant is a document of "
    "its own, as it stands last; its part is what follows the generation prompt",
}
"""The ways to find the assistant's text in a rendered chat, each with an explanation for the user."""
_ANOTHER = "name one in data.chat_template (a chat_template.jinja) that does, or that has {% generation %} markers"
Tools = list[Any] | None


@dataclass(frozen=True)
class Written:
    """A chat as the template writes it.

    Attributes:
        texts: a chat becomes several if the template writes earlier turns differently from the last one.
        marking: how the assistant's text was found.
        ends: for each turn that trains the control tokens at its end, in order; one of them ends generation.
        settings: for each turn that trains and begins with the generation prompt of another setting of `data.template`,
            this setting; "" if the first begins with none, as the template marks it.
    """

    texts: list[Spanned]
    marking: Marking
    ends: list[tuple[str, ...]]
    settings: list[str]


@dataclass(frozen=True)
class _Cut:
    """The first `end` messages of a chat, where they are written, and the assistant's ranges in it.

    The ranges are None if no turn is found in this text, so that it does not train.
    """

    end: int
    layout: Layout
    spans: list[tuple[int, int]] | None


class ChatTemplate:
    """The chat template of a tokenizer.

    Raises:
        UserError: the tokenizer has no usable chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise UserError(
                "the tokenizer has no chat template, so chat messages have no written form; "
                "name a file or a model with one in data.chat_template, or give the data as text or prompt and "
                "completion"
            )
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:  # several named templates, and none is the default
            raise UserError(f"the tokenizer's chat template cannot be used: {error}") from None
        self._tokenizer, self._template = tokenizer, template
        self._thinking = Thinking(template, lambda *chat, **options: self._render(*chat, **options)[0])
        self._ends = TurnEnds(lambda messages: self._render(messages, None), tokenizer.get_added_vocab())
        self._has_markers = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None

    def write(self, messages: Messages, tools: Tools) -> Written:
        """Render a chat, and find what the assistant wrote in it.

        Args:
            messages: from `checked_messages`.
            tools: descriptions of the tools that the assistant may call; None for no tools.

        Raises:
            MalformedError: the template raises an error, leaves out part of the chat, or exceeds 10 s or 1 GiB when it
                is run once.
        """
        with _refusing():
            messages = placed(messages, self._template)
            self._thinking.refuse_broken(messages)
            messages = fitted(messages, lambda chat: self._render(chat, tools)[0])
            text, spans = self._render(messages, tools)
            if tools and self._tried(messages, None) == text:
                raise _left_out("tools")
            refuse_lost_parameters(tools, text)
            marks = marked(messages)
            if self._has_markers:
                layout = self._layout(text, len(messages), marks, tools)
                cuts = [_Cut(len(messages), layout, spans := _weighted(messages, spans))]
                _refuse_wrong_markers(messages, layout, spans)
            else:
                cuts = self._turns(text, messages, marks, tools)
            self._refuse_lost(messages, marks[1], cuts, tools)
            texts, ends, settings = [], [], list[str]()
            for cut in cuts:
                if cut.spans is not None:
                    calls = bool(messages[cut.end - 1].get("tool_calls"))
                    spans, begun = self._thinking.trained(cut.layout.text, cut.spans)
                    spanned, tokens = self._ends.added(cut.layout.text, spans, calls)
                    for turn in tokens:
                        if turn[-1:] == turn[-2:-1] != ():
                            raise MalformedError(
                                f"an answer ends with {turn[-1]}, which the template adds; take it out"
                            )
                    texts.append(spanned)
                    ends += tokens
                    settings += filter(None, begun)
                    if self._has_markers and begun[:1] == [None] and self._thinking.usual and _asked(messages):
                        settings.append("")
        for text, _ in texts:
            checked_text(text, "rendered chat")
        marking: Marking = "markers" if self._has_markers else "prompts" if len(texts) == 1 else "turns"
        return Written(texts, marking, ends, settings)

    def prompt(self, messages: Messages) -> str:
        """Return a chat with the generation prompt after it.

        Raises `MalformedError` as `write` does, but only if the template leaves out what others than the assistant say.
        """
        with _refusing():
            messages = fitted(placed(messages, self._template), lambda chat: self._render(chat, None, prompt=True)[0])
            text, _ = self._render(messages, None, prompt=True)
            copies, texts = marked(messages)
            written = tried(lambda chat: self._render(chat, None, prompt=True)[0], copies)
            kept = range(len(texts)) if written is None else Layout.of(text, written, texts).kept
            for number, given in enumerate(texts):
                if number not in kept and given.key == "content" and messages[given.message]["role"] != "assistant":
                    raise _left_out(f"{given.value[:40]!r} in content of message {given.message + 1}, or a part of it")
        return text

    def told_apart(self, text: str, control: Collection[str]) -> str | None:
        """Return `Thinking.told_apart` of what a model wrote after `prompt`."""
        return self._thinking.told_apart(text, control)

    def unread_keys(self, messages: Messages) -> set[str]:
        """Return the keys of messages that the template does not read, and that no message needs."""
        return {key for message in messages for key in message} - _READ - reads(self._template).words

    def _render(self, messages: Messages, tools: Tools, *, prompt: bool = False, **arguments: Any) -> Spanned:
        """Return a chat as the template writes it, and the character ranges of its `{% generation %}` blocks.

        This is the only place where the template is run, and what transformers' `apply_chat_template` does: keys of
        null are left out. `prompt` appends the generation prompt; `arguments` replace those of `data.template`.

        Raises:
            UserError: the template takes more than `_SECONDS`, or writes too much.
            MemoryError: it takes more than `_BYTES` of memory, on systems with /proc.
        """
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        options: dict[str, Any] = {**self._tokenizer.special_tokens_map, **arguments}
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
        if len(text) > _BYTES // 16:
            raise MalformedError("the chat template's output exceeds the memory limit")
        return text, [(low, high) for low, high in spans[0]] if self._has_markers else []

    def _layout(self, text: str, end: int, marks: tuple[Messages, list[Text]], tools: Tools) -> Layout:
        """Return where the template writes the first `end` messages, which it writes as `text`."""
        messages, texts = marks
        return Layout.of(text, self._render(messages[:end], tools)[0], texts)

    def _turns(self, full: str, messages: Messages, marks: tuple[Messages, list[Text]], tools: Tools) -> list[_Cut]:
        """Cut a chat after turns of the assistant, for a template without `{% generation %}` markers.

        A turn is what the template adds to the generation prompt of the messages before when the turn stands last. If
        the whole chat, `full`, begins with the chat of a turn, both are one text; else the turn ends a text of its own.
        If a template writes the messages before a turn differently once the turn is there (gpt-oss drops the thoughts
        at calls of tools), they stay as they are when the turn is generated.

        Raises:
            MalformedError: the first message is the assistant's, or a turn does not begin with its generation prompt.
        """
        if messages[0]["role"] == "assistant":
            raise MalformedError(
                "the assistant speaks first, and without {% generation %} markers in the chat template "
                "nothing shows where its part begins"
            )

        layouts: dict[int, Layout] = {}  # of turns whose text is put together

        @cache
        def alone(index: int) -> tuple[int, str]:
            before, _ = self._render(messages[:index], tools, prompt=True)
            after = full if index + 1 == len(messages) else self._render(messages[: index + 1], tools)[0]
            begin = self._thinking.begin(before, after)
            if begin is None and (continued := self._continued(before, after, index, marks, tools)) is not None:
                layouts[index + 1] = continued
                return len(before), continued.text
            if begin is None:
                remedy = self._thinking.remedy(messages[: index + 1], tools) or _ANOTHER
                raise MalformedError(
                    f"the chat template does not begin message {index + 1} with its own generation prompt, which ends "
                    f"in {before[-30:]!r}, so what is the assistant's cannot be told; {remedy}"
                )
            return begin, after

        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        alone(turns[0])  # a chat that is refused is refused for its first turn
        cuts: list[_Cut] = []
        end, text = len(messages), full
        while turns:
            layout = (layouts.get(end) if cuts else None) or self._layout(text, end, marks, tools)
            lost = _keys(marks[1], layout.lost(marks[1]))
            if lost and not cuts:  # what no turn has is found without rendering all of them
                self._refuse_ignored(messages, min(lost), _keys(marks[1], layout.kept)[min(lost)], tools)
            finder = TurnFinder(layout, messages[:end], {*range(end)} - lost.keys(), alone)
            first, spans = len(turns), []
            while turns and (span := finder.span(turns[-1])) is not None:
                spans += [span] if messages[turns.pop()].get("weight", 1) else []
            cuts.append(_Cut(end, layout, spans[::-1] if len(turns) < first else None))
            if turns:
                end, text = turns[-1] + 1, alone(turns[-1])[1]
        return cuts[::-1]

    def _continued(
        self, before: str, after: str, index: int, marks: tuple[Messages, list[Text]], tools: Tools
    ) -> Layout | None:
        """Return the layout of `before`, a chat with a generation prompt, continued by the message at `index` as it is
        written in `after`; None if that does not begin with the same prompt, behind the same end of a message."""
        layout, prompt = self._layout(after, index + 1, marks, tools), self._thinking.usual
        low, high = (layout.around(index) or ((0, 0),))[0]
        at = after.find(prompt, low, high)
        if not prompt or at < 0 or not before.endswith(after[low : at + len(prompt)]):
            return None
        messages, texts = marks
        marked_before, _ = self._render(messages[:index], tools, prompt=True)
        marked_after = unmarked_from(self._render(messages[: index + 1], tools)[0], at + len(prompt))
        return Layout.of(before + after[at + len(prompt) :], marked_before + marked_after, texts)

    def _refuse_lost(self, messages: Messages, texts: list[Text], cuts: list[_Cut], tools: Tools) -> None:
        """Raise `MalformedError` if the template drops part of a message from all texts of a chat.

        What stands between its marks is kept. Where nothing of a key is, the template may ignore it; where one of
        several texts is not, its words must be near the others. Content is always kept.
        """
        kept = {number for cut in cuts for number in cut.layout.kept}
        keys = _keys(texts, kept)
        for at in range(len(messages)):
            self._refuse_ignored(messages, at, keys[at], tools)
        for number, text in enumerate(texts):
            at, synonyms = text.message, REASONING if text.key in REASONING else ()
            if number in kept or not keys[at].isdisjoint(synonyms):
                continue
            near = [around for cut in cuts if (around := cut.layout.near(at)) is not None]
            if text.key == "content" or (near and all(missing_word(text.value, around) for around in near)):
                raise _left_out(f"{text.value[:40]!r} in {text.key} of message {at + 1}, or a part of it")

    def _refuse_ignored(self, messages: Messages, at: int, kept: Set[str], tools: Tools) -> None:
        """Raise `MalformedError` if the template ignores a key of the message at the index `at`, or the text before
        `</think>` in it: it writes the same without. `kept` are keys of which something is known to be written."""
        message = messages[at]
        for names in _MAY_BE_IGNORED:
            # The name in a tool's message is also in the call that it answers, so it may be ignored.
            given = [name for name in names if message.get(name) and (name, message["role"]) != ("name", "tool")]
            if given and kept.isdisjoint(given):
                without = {key: value for key, value in message.items() if key not in given}
                if self._is_same(messages, at, without, tools):
                    raise _left_out(f"{given[0]} of message {at + 1}")
        thought, mark, answer = message["content"].rpartition("</think>")
        thinks = mark and thought.strip() and message["role"] == "assistant" and "content" not in kept
        if thinks and self._is_same(messages, at, message | {"content": answer}, tools):
            raise _left_out(f"the text before </think> in message {at + 1}")

    def _is_same(self, messages: Messages, at: int, replacement: dict[str, Any], tools: Tools) -> bool:
        """Return whether the template writes the same with another message at the index `at`.

        Without `{% generation %}` markers the chat is cut after the assistant's next turn, as `_turns` cuts it.
        """
        turns = (end for end, message in enumerate(messages, 1) if end > at and message["role"] == "assistant")
        end = len(messages) if self._has_markers else next(turns, len(messages))
        written, _ = self._render(messages[:end], tools)
        changed = self._tried([*messages[:at], replacement, *messages[at + 1 : end]], tools)
        return changed == written

    def _tried(self, messages: Messages, tools: Tools) -> str | None:
        """Return the chat as the template writes it; None if the template fails."""
        rendered = tried(lambda chat: self._render(chat, tools), messages)
        return None if rendered is None else rendered[0]


def _keys(texts: list[Text], numbers: Collection[int]) -> dict[int, set[str]]:
    """Return index of a message -> its keys that hold one of the texts with these numbers."""
    keys: dict[int, set[str]] = defaultdict(set)
    for number in numbers:
        keys[texts[number].message].add(texts[number].key)
    return keys


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


def _asked(messages: Messages) -> bool:
    """Return whether the first message that trains answers a user: after a tool's result the prompt may be another."""
    roles = [m["role"] for m in messages if m["role"] != "assistant" or m.get("weight", 1)]
    return "user" in roles[: roles.index("assistant")][-1:]


def _refuse_wrong_markers(messages: Messages, layout: Layout, spans: list[tuple[int, int]]) -> None:
    """Raise `MalformedError` if no text of a message that trains is in the ranges `spans`, or one of another is."""
    for at, (first, last) in layout.bounds.items():
        message = messages[at]
        is_marked = any(low < last and first < high for low, high in spans)
        if is_marked != (message["role"] == "assistant" and message.get("weight") != 0):
            raise MalformedError(
                f"the chat template has message {at + 1}, the {message['role']}'s, "
                f"{'within' if is_marked else 'outside of'} {{% generation %}}, so that it would "
                f"{'' if is_marked else 'not '}train; name another in data.chat_template"
            )


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn every error of the `with` block into a `MalformedError`: template code can raise any exception."""
    try:
        yield
    except UserError as error:
        raise MalformedError(str(error)) from None
    except Exception as error:
        raise MalformedError(f"the chat template refuses it: {one_line(error)}") from None


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
