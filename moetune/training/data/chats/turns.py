"""Where the assistant's turns begin and end in a rendered chat, found with few renderings."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable
from typing import Any

from moetune.training.data.chats.marks import Layout, Messages

_SCALAR = r"-?\d[\d.]*(?:e[-+]?\d+)?|true|false|null|none"


class TurnFinder:
    """Finds the turns of a chat that are written in it as they are when they stand last.

    To render the chat of each turn would take a time that grows with the square of their number. Of turns that are
    alike (`_kind`) only the first and the last are rendered; those between begin and end at the same places in what the
    template writes around them.

    Args:
        layout: the chat, and where its messages are in it.
        whole: indices of the messages that have all their texts in it.
        alone: returns for a turn's index where it begins when it stands last, and the chat that ends with it.
    """

    def __init__(
        self, layout: Layout, messages: Messages, whole: Collection[int], alone: Callable[[int], tuple[int, str]]
    ) -> None:
        self._text, self._alone = layout.text, alone
        self._gaps: dict[int, tuple[_Gap, _Gap]] = {}
        self._kinds: dict[int, Hashable] = {}
        self._alike: dict[Hashable, list[int]] = defaultdict(list)
        self._known: dict[Hashable, tuple[int, int] | None] = {}
        for index, message in enumerate(messages):
            ranges = layout.around(index)
            if message["role"] == "assistant" and ranges is not None and index in whole:
                ids = _ids(messages[max(index - 2, 0) : index + 3])  # of texts beside an empty message, too
                before, after = (_Gap(layout.text, *bounds, ids) for bounds in ranges)
                self._gaps[index] = before, after
                near = map(_signature, messages[max(index - 1, 0) : index + 2])
                kind = self._kinds[index] = *near, before.key, after.key
                self._alike[kind].append(index)

    def span(self, index: int) -> tuple[int, int] | None:
        """Return the character range of a turn; None if the chat that ends with it is no beginning of this one.

        To be called from the last turn to the first.
        """
        kind = self._kinds.get(index)
        places = self._known.get(kind)
        if places is not None:
            before, after = self._gaps[index]
            return before.position(places[0]), after.position(places[1])
        begin, chat = self._alone(index)
        if not self._text.startswith(chat):
            return None
        if kind is not None and kind not in self._known:
            places, of_first = self._places(index), self._places(self._alike[kind][0])
            self._known[kind] = places if places == of_first else None
        return begin, len(chat)

    def _places(self, index: int) -> tuple[int, int] | None:
        """Return where a turn begins and ends in the keys of the gaps around it."""
        begin, chat = self._alone(index)
        before, after = (gap.place(at) for gap, at in zip(self._gaps[index], (begin, len(chat)), strict=True))
        return (before, after) if self._text.startswith(chat) and before is not None and after is not None else None


class _Gap:
    """What a template writes between the texts of two messages: `text[low:high]`.

    Attributes:
        key: the same without what differs from message to message: numbers, and the `ids` of tool calls.
    """

    def __init__(self, text: str, low: int, high: int, ids: Collection[str]) -> None:
        pattern = "|".join([*map(re.escape, ids), _SCALAR])
        varying = re.compile(pattern, re.IGNORECASE)
        self._low, self._high = low, high
        self._varying = [match.span() for match in varying.finditer(text, low, high)]
        self.key = varying.sub("0", text[low:high])

    def place(self, position: int) -> int | None:
        """Return where a position in the text is in `key`; None if it is outside, or within what differs."""
        if not self._low <= position <= self._high or any(low < position < high for low, high in self._varying):
            return None
        return position - self._low - sum(high - low - 1 for low, high in self._varying if high <= position)

    def position(self, offset: int) -> int:
        """Return where an offset in `key` is in the text."""
        position = self._low + offset
        for low, high in self._varying:
            position += high - low - 1 if low < position else 0
        return position


def _signature(message: dict[str, Any]) -> Hashable:
    keys = frozenset(key for key, value in message.items() if value)
    return message["role"], keys, "</think>" in message["content"]


def _ids(messages: Messages) -> list[str]:
    """Return the ids of tool calls in messages, the longest first."""
    holders = [*messages, *(call for message in messages for call in message.get("tool_calls") or ())]
    ids = {holder.get(key) for holder in holders for key in ("id", "tool_call_id")}
    return sorted((id for id in ids if isinstance(id, str) and id), key=len, reverse=True)
