"""Which token ends a turn of the assistant: in what a chat template writes, and among those that end generation."""

import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from moetune.errors import UserError
from moetune.training.data.marks import Messages

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
        self._tokens = tuple(sorted((token for token in tokens if token.strip()), key=len, reverse=True))
        self._first = re.compile(rf"\s*(?:{'|'.join(map(re.escape, self._tokens)) or '(?!)'})")

        @cache
        def rendered(calls: bool, followed: bool = False) -> Spanned | None:
            try:
                return render([_ASKED, _TURNS[calls], *([_NEXT[calls]] if followed else [])])
            except UserError:  # the time limit
                raise
            except Exception:  # the template refuses such a chat
                return None

        self._rendered = rendered

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
        for (low, high), (following, _) in zip(spans, [*spans[1:], (len(text) + 1, 0)], strict=True):
            begin = begin if ended and ended[-1][1] == low else low
            if high != following:
                if high == len(text):
                    text += self._of_next(calls)
                high = min(max(high, self._end(text, high)), following)
                ends.append(self._tokens_at_end(text[begin:high]))
            ended.append((low, high))
        return (text, ended), ends

    def _end(self, text: str, high: int) -> int:
        """Return the position after the token that ends the turn whose part ends at `high`; `high` if there is none."""
        outside = [self._outside(calls) for calls in (False, True)]
        for end in outside:
            if end and text.startswith(end, high):
                return high + len(end)
        following = self._first.match(text, high) if self._leaves_open() or any(outside) else None
        return following.end() if following else high

    def _outside(self, calls: bool) -> str:
        """Return the tokens that a template with markers writes at the end of the last turn, outside of them."""
        text, spans = self._rendered(calls) or ("", [])
        after = text[spans[-1][1] :].rstrip() if spans else ""
        return after if not self._without_tokens(after) else ""

    def _leaves_open(self) -> bool:
        """Return whether the template writes nothing at the end of a turn."""
        text, _ = self._rendered(False) or ("?", [])
        return not text.rpartition(_SAID)[2].strip()

    def _of_next(self, calls: bool) -> str:
        """Return the first token of the message after a turn, if the template writes nothing at the end of a turn."""
        shorter, longer = self._rendered(calls), self._rendered(calls, True)
        if not self._leaves_open() or shorter is None or longer is None or not longer[0].startswith(shorter[0]):
            return ""
        following = self._first.match(longer[0], len(shorter[0]))
        return following[0] if following else ""

    def _tokens_at_end(self, text: str) -> tuple[str, ...]:
        tokens: list[str] = []
        text = text.rstrip()
        while text.endswith(self._tokens):
            tokens.insert(0, next(token for token in self._tokens if text.endswith(token)))
            text = text[: -len(tokens[0])].rstrip()
        return tuple(tokens)

    def _without_tokens(self, text: str) -> str:
        for token in self._tokens_at_end(text):
            text = text.replace(token, "")
        return text.strip()
