"""Thoughts of the assistant: put where the template writes them, and none trained that nobody wrote."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any

from moetune.training.data.chats.marks import REASONING, Messages
from moetune.training.data.chats.template_arguments import given, reads
from moetune.training.data.values import MalformedError

_OPEN, _CLOSE = "<think>", "</think>"
_THOUGHT, _ANSWER = "qx0bxq", "qx1bxq"  # texts that no template has

Render = Callable[..., str]
"""Returns a chat as a chat template writes it: of messages and tools, with `prompt`, and arguments of the template."""


def placed(messages: Messages, template: str) -> Messages:
    """Return messages with thoughts that stand in the content, in <think> tags, under the key that `template` reads.

    Nothing is moved if it reads no such key. The opening tag may be missing, as in what models write after a generation
    prompt that ends with it; then the closing one must end or begin a line.

    Raises:
        MalformedError: a message has another thought under the key.
    """
    key = next((key for key in REASONING if key in reads(template).words), None)
    return messages if key is None else [_split(message, at, key) for at, message in enumerate(messages, 1)]


def _split(message: dict[str, Any], number: int, key: str) -> dict[str, Any]:
    """Return a message with the thought in its content under `key`; `number` counts messages from 1."""
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, str) or _CLOSE not in content:
        return message
    head, _, answer = content.partition(_CLOSE)
    before, opening, thought = head.partition(_OPEN)
    if before.strip() if opening else not (head.endswith("\n") or answer.startswith("\n")):
        return message
    answer = answer.lstrip("\n") if answer.strip() else ""
    thought, rest = (thought if opening else head).strip("\n"), message | {"content": answer}
    written = next((message[name] for name in REASONING if message.get(name)), None)
    if written is None:
        return rest | {key: thought} if thought.strip() else rest
    if thought.strip() != str(written).strip():
        raise MalformedError(f"message {number} has one thought in its content and another beside it; keep one")
    return rest


def refuse_cut(answer: str, what: str) -> None:
    """Raise `MalformedError` for an answer, called `what`, that begins with a thought which does not end."""
    opened = re.match(r"\s*([<\[])((?:seed:)?think(?:ing)?)([>\]])", answer, re.IGNORECASE)
    if opened and "{}/{}{}".format(*opened.groups()) not in answer:
        tag = "".join(opened.groups())
        raise MalformedError(f"{what} opens {tag} and does not close it; end the thought, or leave the record out")


class Thinking:
    """How turns of the assistant begin in a chat template that can be switched to write thoughts, or empty ones.

    Some templates write an empty thought into a turn without one, and so does their generation prompt with another
    setting, such as `enable_thinking: false`. What a generation prompt says is not written by the assistant. So a turn
    is trained from the end of the longest generation prompt that it begins with, over all settings that `data.template`
    leaves open.
    """

    def __init__(self, template: str, render: Render) -> None:
        self._template, self._render = template, render

    def begin(self, before: str, after: str) -> int | None:
        """Return where the last message of the chat `after` begins to be the assistant's; None if that is not known.

        `before` is the chat without this message, with a generation prompt.
        """
        if after.startswith(before):
            return len(before)
        usual = self.usual
        low = len(before) - len(usual)
        if not usual or not before.endswith(usual) or not after.startswith(before[:low]):
            return None
        return next((low + len(prompt) for prompt in self._prompts if after.startswith(prompt, low)), None)

    def told_apart(self, text: str, control: Collection[str]) -> str | None:
        """Return what a model wrote after a generation prompt as an answer, behind its thought in <think> tags if there
        is one; None if the template does not write the assistant's last turn so, or `control` tokens are left in it.

        Some templates part them by control tokens, such as `<|channel|>analysis<|message|>`; a thought that was cut is
        closed.
        """
        asked: Messages = [{"role": "user", "content": "?"}]
        keys = [key for key in REASONING if key in reads(self._template).words][:1]
        text = text.strip()
        for thought in (*({key: _THOUGHT} for key in keys), {}):
            with suppress(Exception):
                before = self._render(asked, None, prompt=True)
                answer = {"role": "assistant", "content": _ANSWER, **thought}
                after = self._render([*asked, answer], None, prompt=False)
                turn = after[self.begin(before, after) :]
                opening, *between, _ = (part.strip() for part in re.split(f"{_THOUGHT}|{_ANSWER}", turn))
                written = re.fullmatch("(.*?)".join(map(re.escape, (opening, *between))) + "(.*)", text, re.DOTALL)
                if written is None and opening and thought and text.startswith(opening):
                    written = re.fullmatch("(.*)()", text.removeprefix(opening), re.DOTALL)
                parts = [part.strip() for part in written.groups()] if written else []
                if len(parts) == 1 + len(thought) and not any(token in part for part in parts for token in control):
                    return "".join(f"{_OPEN}\n{part}\n{_CLOSE}\n\n" for part in parts[:-1]) + parts[-1]
        return None

    @property
    def usual(self) -> str:
        """The generation prompt of the template as it is; "" if that is not known."""
        return next((prompt for prompt, setting in self._prompts.items() if not setting), "")

    def trained(self, text: str, spans: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[str | None]]:
        """Return the assistant's ranges of a rendered chat without generation prompts at their beginnings.

        Also return for each the setting whose generation prompt it begins with, "" for the template as it is; None if
        it begins with none.
        """
        ranges = list[tuple[int, int]]()
        settings = list[str | None]()
        for low, high in spans:
            begun = (
                (begin + len(prompt), setting)
                for prompt, setting in self._prompts.items()
                for begin in range(max(0, low - len(prompt)), low + 1)
                if text.startswith(prompt, begin)
            )
            start, setting = next(begun, (low, None))  # of the longest prompt
            ranges.append((min(start, high), high))
            settings.append(setting)
        return ranges, settings

    @cached_property
    def _prompts(self) -> dict[str, str]:
        """Generation prompt -> the setting that gives it, "" for the template as it is; the longest first."""
        asked: Messages = [{"role": "user", "content": "?"}]
        prompts: dict[str, str] = {}
        for setting, arguments in (("", {}), *self._settings(besides=given(self._template))):
            with suppress(Exception):  # the template may refuse the value, or so short a chat
                before, after = (self._render(asked, None, prompt=prompt, **arguments) for prompt in (False, True))
                if after.startswith(before) and after != before:
                    prompts.setdefault(after[len(before) :], setting)
        return dict(sorted(prompts.items(), key=lambda item: -len(item[0])))

    def _settings(self, besides: Iterable[str] = ()) -> Iterator[tuple[str, dict[str, bool]]]:
        """Yield each argument of the template as true and as false: as written in a run file, and as a dict."""
        for name in sorted(reads(self._template).arguments.difference(besides)):
            for value in (False, True):
                yield f"{name}: {str(value).lower()}", {name: value}

    def remedy(self, messages: Messages, tools: list[Any] | None) -> str | None:
        """Return advice on the setting by which the last message begins as the generation prompt does; None if none."""
        for setting, arguments in self._settings():
            with suppress(Exception):
                before = self._render(messages[:-1], tools, prompt=True, **arguments)
                if self._render(messages, tools, prompt=False, **arguments).startswith(before):
                    (name,) = arguments
                    out = f", or take {name} out of it" if name in given(self._template) else ""
                    return f"set data.template: {{{setting}}}{out}"
        return None

    def refuse_broken(self, messages: Messages) -> None:
        """Raise `MalformedError` for a thought in a content that does not end, or that no answer follows."""
        writes_thoughts = any(key in reads(self._template).words for key in REASONING)
        for number, message in enumerate(messages, 1):
            if message["role"] != "assistant":
                continue
            refuse_cut(content := message["content"], f"message {number}")
            is_thought = content.rstrip().endswith(_CLOSE) or (writes_thoughts and not content)
            if is_thought and not message.get("tool_calls") and message.get("weight") != 0:
                raise MalformedError(f"message {number} is a thought without an answer, after which the turn would end")
