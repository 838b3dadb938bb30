"""Marks around a chat's texts: where a template writes each message, and which it drops."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from moetune.errors import UserError

T = TypeVar("T")
Messages = list[dict[str, Any]]
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of one key, the reasoning of a message; transformers fills the others from the one that is given."""
_MARK = re.compile(r"qx(\d+)([be])xq", re.IGNORECASE)
_OPENING = re.compile(r"\s*(?:<think>\s*)?")  # a template that looks for reasoning drops what is before the tag


def tried(render: Callable[[Messages], T], messages: Messages) -> T | None:
    """Return what `render` returns; None if the chat template refuses such a chat, by an error of any kind.

    A `UserError`, such as that of the time limit, is passed on.
    """
    try:
        return render(messages)
    except UserError:
        raise
    except Exception:
        return None


@dataclass(frozen=True)
class Text:
    """A text that a template should write: under `key` of the message with the index `message`, perhaps deep in it; of
    tool calls in that with the index `call`."""

    message: int
    key: str
    value: str
    call: int = 0


def marked(messages: Messages) -> tuple[Messages, list[Text]]:
    """Return the messages with marks around each text of their contents, reasoning, names and tool calls, and the texts
    in the order of their numbers, which the marks hold. The name in a tool's message repeats a call's, and has none."""
    texts: list[Text] = []

    def mark(value: Any, at: int, key: str, call: int = 0) -> Any:
        if isinstance(value, dict):
            return {name: mark(inner, at, key, call) for name, inner in value.items()}
        if isinstance(value, list):
            return [mark(inner, at, key, call) for inner in value]
        if not isinstance(value, str) or not value.strip():
            return value
        # Inside of the white space, which many templates trim.
        opening = _OPENING.match(value)
        low, high = opening.end() if opening else 0, len(value.rstrip())
        begin, end = (f"qx{len(texts)}{side}xq" for side in "be")
        texts.append(Text(at, key, value[low:high], call))
        return f"{value[:low]}{begin}{value[low:high]}{end}{value[high:]}"

    copies = []
    for at, message in enumerate(messages):
        keys = ("content", *REASONING, *(() if message["role"] == "tool" else ("name",)))
        copy = message | {key: mark(message[key], at, key) for key in keys if key in message}
        if "tool_calls" in message:
            calls = []
            for number, call in enumerate(message["tool_calls"]):
                inner = {key: mark(call["function"][key], at, "tool_calls", number) for key in ("name", "arguments")}
                calls.append(call | {"function": call["function"] | inner})
            copy["tool_calls"] = calls
        copies.append(copy)
    return copies, texts


def begun(written: str) -> set[int]:
    """Return the numbers of the texts whose first mark is in a text with marks."""
    return {int(match[1]) for match in _MARK.finditer(written) if match[2] == "b"}


def unmarked_from(written: str, position: int) -> str:
    """Return a text with marks from a position on, which counts characters outside of marks."""
    for match in _MARK.finditer(written):
        if match.start() > position:
            break
        position += len(match[0])
    return written[position:]


@dataclass(frozen=True)
class Layout:
    """Where a template writes the texts of a chat.

    Attributes:
        text: the chat as the template writes it.
        kept: numbers of the texts whose words are all between their two marks.
        bounds: index of a message -> positions in `text` of the first and the last mark of it, of those that are
            written again only the first time. Empty if marks change what else the template writes, or are not in the
            order of the messages.
    """

    text: str
    kept: frozenset[int]
    bounds: dict[int, tuple[int, int]]

    @classmethod
    def of(cls, text: str, written: str, texts: Sequence[Text]) -> "Layout":
        """Compare a chat as the template writes it, `text`, with `written`, the same with marks around `texts`."""
        pieces, length, last = [], 0, 0
        begins: dict[int, int] = {}
        ends: dict[int, int] = {}
        bounds: dict[int, tuple[int, int]] = {}
        seen: set[str] = set()
        for match in _MARK.finditer(written):
            pieces.append(written[last : match.start()])
            length, last = length + len(pieces[-1]), match.end()
            if (number := int(match[1])) >= len(texts):
                continue
            is_again = match[0].lower() in seen
            seen.add(match[0].lower())
            if match[2] in "bB":
                begins.setdefault(number, length)
            else:
                ends[number] = length
            if is_again:  # such as the name of a function, above the result of the call
                continue
            first, _ = bounds.get(texts[number].message, (length, length))
            bounds[texts[number].message] = first, length
        plain = "".join([*pieces, written[last:]])
        kept = frozenset(
            number
            for number in begins.keys() & ends.keys()
            if missing_word(texts[number].value, plain[begins[number] : ends[number]].casefold()) is None
        )
        flat = [position for _, bound in sorted(bounds.items()) for position in bound]
        in_order = plain == text and flat == sorted(flat)
        return cls(text, kept, bounds if in_order else {})

    @cached_property
    def _order(self) -> dict[int, tuple[int, int]]:
        """Index of a message -> end of the text before it that has marks, and begin of that after it."""
        at, order = sorted(self.bounds), {}
        for position, index in enumerate(at):
            before = self.bounds[at[position - 1]][1] if position else 0
            order[index] = before, self.bounds[at[position + 1]][0] if position + 1 < len(at) else len(self.text)
        return order

    def around(self, index: int) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Return the ranges of `text` between the texts of a message and those before and after it; None if unknown."""
        if index not in self.bounds:
            return None
        (first, last), (before, after) = self.bounds[index], self._order[index]
        return (before, first), (last, after)

    def near(self, index: int) -> str | None:
        """Return `text` from the message before a message to the one after it, casefolded; None if unknown."""
        ranges = self.around(index)
        return None if ranges is None else self.text[ranges[0][0] : ranges[1][1]].casefold()

    def lost(self, texts: Sequence[Text]) -> list[int]:
        """Return the numbers of the texts whose words are neither between their marks nor near their message."""
        numbers = (number for number in range(len(texts)) if number not in self.kept)
        return [n for n in numbers if missing_word(texts[n].value, self.near(texts[n].message) or "") is not None]


def missing_word(content: str, written: str) -> str | None:
    """Search the words of `content` in order in `written`, which is casefolded; return the first that is missing, or
    None."""
    position = 0
    for match in re.finditer(r"\w+", content.casefold()):
        begin = written.find(match[0], position)
        if begin < 0:
            return match[0]
        position = begin + len(match[0])
    return None
