"""What a record means: text, prompt and completion, or chat, turned into token ids and labels.

    {"text": "..."}                              every token trains
    {"prompt": "...", "completion": "..."}       the completion and the end-of-sequence token train
    {"messages": [{"role": .., "content": ..}]}  what the chat template writes for the assistant trains
    Alpaca, ShareGPT                             become one of these (chats.py)

Labels stand under their own token, as transformers expects: the model's loss shifts them by one.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from moetune.errors import UserError, one_line, reading, time_limit
from moetune.training.data.bounded import bounded_memory
from moetune.training.data.chats import (
    MalformedError,
    alpaca_chat,
    alpaca_prompt,
    checked_messages,
    checked_text,
    checked_tools,
    kind,
    lost_content,
    sharegpt_chat,
    with_alpaca_names,
)
from moetune.training.data.documents import Document, Documents
from moetune.training.data.sources import Source
from moetune.training.step.loss import IGNORED

LISTED_PROBLEMS = 20
_TEMPLATE_BYTES = 2**30  # of memory that a chat template may take
_TEMPLATE_SECONDS = 10.0  # that it may take for a record
LISTED_NUMBERS = 3
_MAY_BE_IGNORED = (("tool_calls",), ("function_call",), ("reasoning_content", "reasoning", "thinking"), ("name",))
"""Keys of a message that hold what was said and that not every template writes; several names of one thing together."""
_WINDOW = 2**18
"""Characters that are tokenized at once: tokenizers take 200 bytes and more of memory for each."""
_OVERLAPS = (2**12, 2**14, 2**16)
_LONGEST_SLOW = 2**23
"""Characters of a record for a tokenizer without offsets, which has no windows."""
Format = Literal["text", "prompt", "chat", "alpaca", "sharegpt"]
KEYS: dict[Format, tuple[str, ...]] = {
    "chat": ("messages",),
    "sharegpt": ("conversations",),
    "prompt": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
Strategy = Literal["markers", "prompts", "turns"]
"""How the assistant's tokens of a chat were found: by `{% generation %}`, by the generation prompts of the whole chat,
or by those of its turns, each a document of its own."""
WAYS: dict[Strategy, str] = {
    "markers": "the assistant's part is what the chat template marks with {% generation %}",
    "prompts": "the assistant's part is what follows the chat template's generation prompts",
    "turns": "the chat template writes earlier turns differently, so that each turn of the assistant is a document of "
    "its own, as it stands last; its part is what follows the generation prompt",
}
_ASKS = ("question", "query", "instruction", "input", "prompt", "problem", "user")
_ANSWERS = ("answer", "response", "output", "completion", "solution", "target", "assistant")
_TEXTS = ("content", "body", "document", "passage")
_READERS = {".jsonl": "from_json", ".json": "from_json", ".csv": "from_csv", ".parquet": "from_parquet"}


Tokens = tuple[np.ndarray, np.ndarray]
"""Ids, and which of them train."""
Spanned = tuple[str, list[tuple[int, int]]]
"""A text, and the stretches of its characters that train."""


@dataclass
class Reading:
    """What became of the records of a source.

    Attributes:
        documents: where they are among all that were read, in the order of the source.
        records: for each of them, the first document of its record: a chat may need several.
        dropped: documents left out, those included of which no token to train on was left.
        cut: documents whose end was left out; `unended` of them in the middle of what trains.
        chats: by how the assistant's tokens were found.
    """

    documents: np.ndarray = field(default_factory=lambda: np.arange(0))
    records: np.ndarray = field(default_factory=lambda: np.arange(0))
    dropped: int = 0
    cut: int = 0
    unended: int = 0
    chats: Counter[Strategy] = field(default_factory=Counter)


def read_documents(
    source: Source,
    format: Literal["auto", "text", "prompt", "chat", "alpaca", "sharegpt"],
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    too_long: Literal["error", "drop", "truncate"],
    documents: Documents,
) -> Reading:
    """Tokenizes every record of a source.

    Args:
        source: the rows.
        format: how to read them; `auto` takes the format of the first record that has one, for all of them.
        tokenizer: must have an end-of-sequence token and, for chat, a chat template and offsets.
        longest: tokens that fit one sequence. Longer text is cut into several later.
        too_long: what becomes of a longer prompt or chat.
        documents: are added to.

    Raises:
        UserError: the source is empty, the tokenizer cannot serve, or records cannot be used: those are listed with
            their line or row number, alike ones as one.
    """
    encoder: Encoder | None = None
    read, first = Reading(), len(documents)
    problems = _Problems()
    needed, misread = longest, None
    records: list[int] = []
    for row in source.rows:
        try:
            if row.problem is not None:
                raise MalformedError(row.problem)
            if not isinstance(row.value, dict):
                raise MalformedError(f"{kind(row.value)}, not an object with keys")
            misread = misread or row.value
            record = with_alpaca_names(row.value)
            if encoder is None:
                with reading("the tokenizer"):
                    encoder = Encoder(tokenizer, _detect(record) if format == "auto" else format)
            encoded, way = encoder.encode(record)
            if way:
                read.chats[way] += 1
            of_record = len(documents)
            for document in encoded:
                if len(document) > longest and not document.divisible:
                    if too_long == "error":
                        needed = max(needed, *map(len, encoded))
                        raise MalformedError(f"{needed} tokens do not fit train.sequence_length {longest}")
                    document, whole = document.shortened(longest)
                    if too_long == "drop" or (document.labels == IGNORED).all():
                        read.dropped += 1
                        continue
                    read.cut += 1
                    read.unended += not whole
                documents.add(document)
                records.append(of_record)
        except MalformedError as problem:
            problems.add(row.number, one_line(problem))
    read.documents, read.records = np.arange(first, len(documents)), np.array(records, dtype=np.int64)
    if problems.count:
        hints = [] if encoder is not None or misread is None else [*_conversion(source.name, misread)]
        if needed > longest:
            hints.append(
                f"  prompts and chats are not cut by themselves: raise train.sequence_length to {needed}, or set "
                "data.too_long: drop or truncate"
            )
        raise UserError("\n".join((*problems.summary(source), *hints)))
    if not len(read.documents):
        why = f"all of its {read.dropped:,} records are longer than train.sequence_length {longest}"
        raise UserError(f"{source.name!r} " + (why if read.dropped else "is empty: it holds no record"))
    return read


class Encoder:
    """Turns records of one format into documents."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, format: Format) -> None:
        self.tokenizer = tokenizer
        self.format = format
        self._encode: Callable[[dict[str, Any]], Tokens]
        self._convert: Callable[[dict[str, Any]], dict[str, Any]] = lambda record: record
        if format == "sharegpt":
            self._convert = sharegpt_chat
        elif format == "alpaca":
            self._convert = alpaca_chat if tokenizer.chat_template else alpaca_prompt
        if format in ("chat", "sharegpt") or self._convert is alpaca_chat:
            if not tokenizer.chat_template:
                raise UserError(
                    "the tokenizer has no chat template, so chat messages have no written form; "
                    "name a file or a model with one in data.chat_template, or give the data as text or prompt and "
                    "completion"
                )
            if not tokenizer.is_fast:
                raise UserError("chat data needs a tokenizer with offsets (a tokenizer.json file); this one has none")
            try:
                self._template = tokenizer.get_chat_template()
            except ValueError as error:  # several named templates, and none is the default
                raise UserError(f"the tokenizer's chat template cannot be used: {error}") from None
            self._has_markers = re.search(r"\{%-?\s*generation\s*-?%\}", self._template) is not None
            return
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end-of-sequence token to put after a document")
        self._eos = [tokenizer.eos_token_id]
        first = tokenizer("a")["input_ids"][0]
        self._bos = [first] if first == tokenizer.bos_token_id else []
        self._encode = self._text if format == "text" else self._prompt

    def encode(self, record: dict[str, Any]) -> tuple[list[Document], Strategy | None]:
        """Ids and labels of one record, and for a chat how the assistant's tokens were found.

        Raises:
            MalformedError: the record is not of this format, or nothing in it would train.
        """
        missing = [key for key in KEYS[self.format] if record.get(key) is None]
        if missing:
            found = ", ".join(key for key, value in record.items() if value is not None)
            raise MalformedError(f"no {' and no '.join(map(repr, missing))}; it holds {found or 'nothing'}")
        record = self._convert(record)
        way: Strategy | None = None
        with reading("the record, by the tokenizer,"):
            if "messages" in record and self.format not in ("text", "prompt"):
                texts, way = self._chat(record)
                parts = [self._spanned(text, spans) for text, spans in texts]
            else:
                parts = [self._encode(record)]
        encoded = []
        for ids, trains in parts:
            labels = np.where(trains, ids, IGNORED).astype(np.int32)
            labels[:1] = IGNORED
            if (labels != IGNORED).any():
                encoded.append(Document(np.asarray(ids, dtype=np.int32), labels, divisible=self.format == "text"))
        if not encoded:
            raise MalformedError("no token to train on")
        return encoded, way

    def _text(self, record: dict[str, Any]) -> Tokens:
        body = self._tokens(checked_text(record["text"], "text"))
        if not len(body):
            raise MalformedError("text yields no token")
        ids = _joined(self._bos, body, self._eos)
        return ids, np.ones(len(ids), dtype=bool)

    def _prompt(self, record: dict[str, Any]) -> Tokens:
        # Tokenized apart, so that the boundary is exact: no token holds characters of both.
        prompt = _joined(self._bos, self._tokens(checked_text(record["prompt"], "prompt")))
        body = self._tokens(checked_text(record["completion"], "completion"))
        if not len(body):
            raise MalformedError("completion yields no token")
        ids = _joined(prompt, body, self._eos)
        return ids, np.arange(len(ids)) >= len(prompt)

    def _chat(self, record: dict[str, Any]) -> tuple[list[Spanned], Strategy]:
        """A chat as texts, and what of each the assistant wrote."""
        messages, tools = checked_messages(record["messages"]), checked_tools(record.get("tools"))
        try:
            with bounded_memory(_TEMPLATE_BYTES), time_limit("the chat template", _TEMPLATE_SECONDS):
                messages = self._with_content(messages, tools)
                self._refuse_ignored(messages, tools)
                self._refuse_lost_content(messages, tools)
                if self._has_markers:
                    text, spans = self._marked_spans(messages, tools)
                    texts = [(text, _weighted(messages, spans))]
                else:
                    texts = self._turns(messages, tools)
        except UserError as error:
            raise MalformedError(str(error)) from None
        except Exception as error:  # templates can do what Python can do to a value
            raise MalformedError(f"the chat template refuses it: {one_line(error)}") from None
        for text, _ in texts:
            if not isinstance(text, str) or len(text) > _TEMPLATE_BYTES // 16:
                raise MalformedError("the chat template writes more than any text")
            checked_text(text, "rendered chat")
        return texts, "markers" if self._has_markers else "prompts" if len(texts) == 1 else "turns"

    def _spanned(self, text: str, spans: list[tuple[int, int]]) -> Tokens:
        """The tokens of a text, of which those within the spans train.

        The segments between borders are tokenized apart, as a prompt is before its answer is written: so no token holds
        characters of both. Tokenizers that write a space before each piece change the text by that; with them it is
        tokenized whole.

        Raises:
            MalformedError: a token of the whole holds a border.
        """
        borders = [0, *sorted({border for span in spans for border in span}), len(text)]
        pieces, trains = [], []
        for low, high in itertools.pairwise(borders):
            pieces.append(self._tokens(text[low:high]))
            trains.append(np.full(len(pieces[-1]), any(start <= low < stop for start, stop in spans)))
        ids, (whole, offsets) = _joined(*pieces), self._encoded(text)
        if np.array_equal(ids, whole) or self._decoded(ids) == self._decoded(whole):
            return ids, np.concatenate(trains)
        starts, stops = offsets.T
        # Of a token that is whitespace alone, some tokenizers leave nothing but the position after it.
        firsts = np.where(stops > starts, starts, starts - 1)
        for border in borders:
            if (across := np.flatnonzero((starts < border) & (border < stops))).size:
                start, stop = offsets[across[0]]
                raise MalformedError(
                    f"the token of {text[start:stop]!r} holds the end of one message's part and the beginning of the "
                    "next; name a template in data.chat_template that parts them by a special token"
                )
        return whole, np.any([(low <= firsts) & (firsts < high) for low, high in [(0, 0), *spans]], axis=0)

    def _decoded(self, ids: np.ndarray) -> str:
        text: Any = self.tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)
        return text

    def _refuse_ignored(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> None:
        """Refuse a chat of which the template leaves something out: it writes the same without it.

        Without markers each turn is also written as the last one, and what is there is not lost.
        """
        without: list[tuple[str, int, dict[str, Any]]] = []
        for at, message in enumerate(messages):
            for names in _MAY_BE_IGNORED:
                # A tool's name stands in the call that it answers.
                here = [name for name in names if message.get(name) and (name, message["role"]) != ("name", "tool")]
                if here:
                    left = {key: value for key, value in message.items() if key not in here}
                    without.append((f"{here[0]} of message {at + 1}", at, left))
            thought, mark, said = (message["content"] or "").rpartition("</think>")
            if mark and thought.strip() and message["role"] == "assistant":
                without.append((f"what stands before </think> in message {at + 1}", at, {**message, "content": said}))
        ends = [len(messages)]
        if not self._has_markers:
            ends = [at for at, message in enumerate(messages, 1) if message["role"] == "assistant"] + ends
        cases = [
            (what, [*messages[:at], left, *messages[at + 1 :]], tools, next(end for end in ends if end > at))
            for what, at, left in without
        ]
        for what, fewer, tools_left, end in [*([("tools", messages, None, len(messages))] if tools else []), *cases]:
            full = self._render(messages[:end], tools)
            try:
                is_lost = self._render(fewer[:end], tools_left) == full
            except UserError:  # the time is over
                raise
            except Exception:  # the template needs it
                continue
            if is_lost:
                raise _left_out(what)

    def _refuse_lost_content(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> None:
        """Refuse a chat of whose content the template drops something, in the whole chat and, without markers, in the
        text in which the next turn of the assistant stands last."""
        lost = lost_content(messages, lambda some: self._render(some, tools))
        for index, message in enumerate(messages, 1):
            if not lost or self._has_markers:
                break
            if message["role"] == "assistant" and min(lost) < index < len(messages):
                in_turn = lost_content(messages[:index], lambda some: self._render(some, tools))
                lost = {at: what for at, what in lost.items() if at >= index or at in in_turn}
        for what in lost.values():
            raise _left_out(what)

    def _with_content(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> list[dict[str, Any]]:
        """Content that is null stays so where the template knows it; where it would write `None` it becomes empty."""
        if all(message["content"] is not None for message in messages):
            return messages
        empty = [{**message, "content": message["content"] or ""} for message in messages]
        try:
            written = self._render(messages, tools)
        except UserError:  # the time is over
            raise
        except Exception:  # templates can do what Python can do to a value
            return empty
        return empty if written.count("None") > self._render(empty, tools).count("None") else messages

    def _marked_spans(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> Spanned:
        """The rendered chat, and which characters the template's `{% generation %}` blocks wrote.

        `apply_chat_template(return_assistant_tokens_mask=True)` reads the same blocks, but drops the rest of
        the chat when a block begins with a character that no token holds.
        """
        options: dict[str, Any] = {"return_assistant_tokens_mask": True, **self.tokenizer.special_tokens_map}
        rendered: Any = render_jinja_template([messages], tools, chat_template=self._template, **options)
        texts, spans = rendered
        return texts[0], [(low, high) for low, high in spans[0]]

    def _turns(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> list[Spanned]:
        """The same without markers: what a turn of the assistant, standing last, adds to the generation prompt of the
        messages before it. Turns that the next one repeats to the letter are one text with it."""
        texts: list[Spanned] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if index == 0:
                raise MalformedError(
                    "the assistant speaks first, and without {% generation %} markers in the chat template "
                    "nothing shows where its part begins"
                )
            before = self._render(messages[:index], tools, add_generation_prompt=True)
            after = self._render(messages[: index + 1], tools)
            if not after.startswith(before):
                raise MalformedError(
                    f"the chat template does not begin message {index + 1} with its own generation prompt, so what is "
                    "the assistant's cannot be told; name one in data.chat_template (a chat_template.jinja) that does, "
                    "or that has {% generation %} markers"
                )
            spans = [(len(before), len(after))] if message.get("weight", 1) else []
            if texts and after.startswith(texts[-1][0]):
                spans = texts.pop()[1] + spans
            texts.append((after, spans))
        full = self._render(messages, tools)
        if full.startswith(texts[-1][0]):
            texts[-1] = full, texts[-1][1]
        return texts

    def _render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, add_generation_prompt: bool = False
    ) -> str:
        rendered: Any = self.tokenizer.apply_chat_template(
            messages, tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return rendered

    def _tokens(self, text: str) -> np.ndarray:
        if self.tokenizer.is_fast:
            return self._encoded(text)[0]
        if len(text) > _LONGEST_SLOW:
            raise MalformedError(
                f"{len(text):,} characters are more than this tokenizer, which has no tokenizer.json, takes at once; "
                f"cut the record into some of up to {_LONGEST_SLOW:,}"
            )
        return np.array(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int32)

    def _encoded(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids, and the characters of each (int32 [tokens, 2]), window by window.

        Windows overlap. Where both say the same of the middle half of what they share, they are joined in its middle:
        what a tokenizer makes of a text's place does not depend on what is far away. Where they differ, more is shared.

        Raises:
            MalformedError: they differ in all that is tried.
        """
        ids, offsets = self._window(text, 0)
        kept, end = [], min(_WINDOW, len(text))
        while end < len(text):
            for overlap in _OVERLAPS:
                begin, middle, quarter = end - overlap, end - overlap // 2, overlap // 4
                next_ids, next_offsets = self._window(text, begin)
                (a, at, b), (c, then, d) = (
                    np.searchsorted(some[:, 0], [middle - quarter, middle, middle + quarter])
                    for some in (offsets, next_offsets)
                )
                alike = [(ids[a:b], next_ids[c:d]), (offsets[a:b], next_offsets[c:d])]
                if a < b and at - a == then - c and all(np.array_equal(one, other) for one, other in alike):
                    break
            else:
                raise MalformedError(
                    f"its {len(text):,} characters are too many to tokenize at once, and near character {end:,} there "
                    f"is no place to part them; cut the record into some of up to {_WINDOW:,} characters"
                )
            kept.append((ids[:at], offsets[:at]))
            ids, offsets = next_ids[then:], next_offsets[then:]
            end = min(begin + _WINDOW, len(text))
        kept.append((ids, offsets))
        return np.concatenate([one for one, _ in kept]), np.concatenate([one for _, one in kept])

    def _window(self, text: str, begin: int) -> tuple[np.ndarray, np.ndarray]:
        part = text[begin : begin + _WINDOW]
        encoded = self.tokenizer(part, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = np.array(encoded["offset_mapping"], dtype=np.int32).reshape(-1, 2) + begin
        return np.array(encoded["input_ids"], dtype=np.int32), offsets.astype(np.int32)


def _left_out(what: str) -> MalformedError:
    return MalformedError(
        f"the chat template leaves out {what}, which would be lost; name a template that writes it in "
        "data.chat_template, or take it out of the record"
    )


def _joined(*parts: np.ndarray | list[int]) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


def _weighted(messages: list[dict[str, Any]], spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The assistant's parts without those of messages whose `weight` is 0."""
    weights = [message.get("weight", 1) for message in messages if message["role"] == "assistant"]
    if all(weights):
        return spans
    if len(weights) != len(spans):
        raise MalformedError(
            f"weight: 0 cannot be heeded: the chat template marks {len(spans)} parts for {len(weights)} messages "
            "of the assistant"
        )
    return [span for span, weight in zip(spans, weights, strict=True) if weight]


def _detect(record: dict[str, Any]) -> Format:
    for format, keys in KEYS.items():
        if all(record.get(key) is not None for key in keys):
            return format
    raise MalformedError(
        f"it holds {', '.join(record) or 'nothing'}; a record needs 'text', 'prompt' and 'completion', 'messages', "
        "'instruction' and 'output' (Alpaca), or 'conversations' (ShareGPT)"
    )


class _Problems:
    """What is wrong with records: what differs in numbers alone as one, with a count. No more is kept than is said."""

    def __init__(self) -> None:
        self.count = 0
        self._alike: Counter[str] = Counter()
        self._first: dict[str, list[tuple[int, str]]] = {}

    def add(self, number: int, said: str) -> None:
        self.count += 1
        text = re.sub(r"\d+", "#", said)
        if text in self._first or len(self._first) < LISTED_PROBLEMS:
            self._alike[text] += 1
            first = self._first.setdefault(text, [])
            if len(first) < LISTED_NUMBERS:
                first.append((number, said))

    def summary(self, source: Source) -> Iterator[str]:
        yield f"{source.name!r}: {f'{self.count:,} records' if self.count > 1 else '1 record'} cannot be used"
        lines: list[tuple[int, int, str]] = []
        for text, first in self._first.items():
            if rest := self._alike[text] - len(first):
                numbers = ", ".join(f"{number}" for number, _ in first)
                said = f"{source.unit}s {numbers} and {rest:,} more: {first[0][1]}"
                lines.append((first[0][0], self._alike[text], said))
            else:
                lines += [(number, 1, f"{source.unit} {number}: {said}") for number, said in first]
        lines = sorted(lines)[:LISTED_PROBLEMS]
        yield from (f"  {said}" for _, _, said in lines)
        if unsaid := self.count - sum(count for _, count, _ in lines):
            yield f"  and {unsaid:,} more"


def _conversion(name: str, record: dict[str, Any]) -> Iterator[str]:
    """What would turn records with these keys into some that are read, if their names tell."""
    asks, answers, texts = ([key for key in keys if key in record] for keys in (_ASKS, _ANSWERS, _TEXTS))
    names = {asks[0]: "instruction", answers[0]: "output"} if asks and answers else {texts[0]: "text"} if texts else {}
    names = {old: new for old, new in names.items() if old != new}
    suffix = PurePath(name).suffix.lower()
    if names and suffix in _READERS:
        read = f"Dataset.{_READERS[suffix]}({name!r})"
        yield (
            f"  to convert: python -c \"from datasets import Dataset; {read}.rename_columns({names}).to_json('converted"
            ".jsonl')\""
        )
