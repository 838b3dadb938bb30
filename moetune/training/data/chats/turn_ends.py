"""`TurnEnds`: which token ends an assistant's turn, wherever a template puts it."""

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from moetune.training.data.chats.marks import Messages, tried

Spanned = tuple[str, list[tuple[int, int]]]
"""A text, and the [start, end) character ranges of it that are trained on."""
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
_ASKED: dict[str, Any] = {"role": "user", "content": "a"}
_SAID = "qxz"
_TURNS: dict[bool, dict[str, Any]] = {
    False: {"role": "assistant", "content": _SAID},
    True: {"role": "assistant", "content": "", "tool_calls": [_CALL]},
}
_NEXT: dict[bool, dict[str, Any]] = {
    False: _ASKED,
    True: {"role": "tool", "content": "c", "tool_call_id": "abcdefghi", "name": "f"},
}
"""A turn of the assistant, and the message after it, by whether the turn calls a tool."""


class TurnEnds:
    """Adds to the assistant's part of a chat the token that ends each turn, wherever a template puts it.

    In generation the template writes no more than the prompt, so the model must write the token that ends its turn.
    Where a template writes nothing at the end of a turn (GLM), that is the first token of the next message.

    Args:
        render: returns messages as the template writes them, with the ranges of its `{% generation %}` blocks.
        tokens: the tokenizer's added tokens, special or not.
    """

    def __init__(self, render: Callable[[Messages], Spanned], tokens: Iterable[str]) -> None:
        self._render = render
        self._tokens = tuple(sorted((token for token in tokens if token.strip()), key=len, reverse=True))
        self._token = rf"\s*+(?:{'|'.join(map(re.escape, self._tokens)) or '(?!)'})"
        self._first = re.compile(self._token)

    def added(self, text: str, spans: list[tuple[int, int]], calls: bool) -> tuple[Spanned, list[tuple[str, ...]]]:
        """Return the text and the assistant's ranges with the ends of turns, and the tokens that each turn ends with.

        Args:
            text: a rendered chat.
            spans: the assistant's character ranges, in order; ranges that touch belong to one turn.
            calls: whether the last message is the assistant's and calls a tool.
        """
        ended: list[tuple[int, int]] = []
        ends: list[tuple[str, ...]] = []
        begin = 0
        spans = [span for span in spans if span[0] < span[1]]
        for number, (low, high) in enumerate(spans):
            begin = begin if ended and ended[-1][1] == low else low
            following = spans[number + 1][0] if number + 1 < len(spans) else None
            if high != following:
                if high == len(text):
                    text += self._of_next[calls]
                high = min(self._end(text, begin, high), len(text) if following is None else following)
                ends.append(self._last(text[begin:high]))
            ended.append((low, high))
        return (text, ended), ends

    def _end(self, text: str, low: int, high: int) -> int:
        """Return the position after the token that ends the turn in `text[low:high]`; `high` if it is in there."""
        for end in self._outside:
            if text.startswith(end, high):
                return high + len(end)
        if self._leaves_open or (self._outside and not self._last(text[low:high])):
            following = self._first.match(text, high)
            return following.end() if following else high
        return high

    @cached_property
    def _outside(self) -> list[str]:
        """What a template with markers writes outside of them at the end of a turn, if it is only tokens."""
        turns = [self._turn(calls) for calls in (False, True)]
        after = [text[spans[-1][1] :].rstrip() for text, spans in filter(None, turns) if spans]
        return [end for end in after if end and re.fullmatch(rf"(?:{self._token})*", end)]

    @cached_property
    def _leaves_open(self) -> bool:
        """Whether the template writes nothing at the end of a turn."""
        plain = self._turn(False)
        return plain is not None and not plain[0].rpartition(_SAID)[2].strip()

    @cached_property
    def _of_next(self) -> dict[bool, str]:
        """The first token of the message after a turn that calls a tool, or does not; "" if the template ends turns."""
        tokens = dict.fromkeys((False, True), "")
        for calls in tokens if self._leaves_open else ():
            shorter, longer = self._turn(calls), self._turn(calls, _NEXT[calls])
            if shorter and longer and longer[0].startswith(shorter[0]):
                following = self._first.match(longer[0], len(shorter[0]))
                tokens[calls] = following[0] if following else ""
        return tokens

    def _turn(self, calls: bool, *following: dict[str, Any]) -> Spanned | None:
        return tried(self._render, [_ASKED, _TURNS[calls], *following])

    def _last(self, text: str) -> tuple[str, ...]:
        """Return the tokens at the end of a text."""
        tokens: list[str] = []
        text = text.rstrip()
        while text.endswith(self._tokens):
            tokens.insert(0, next(token for token in self._tokens if text.endswith(token)))
            text = text[: -len(tokens[0])].rstrip()
        return tuple(tokens)
