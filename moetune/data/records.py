"""What a record means: text, prompt and completion, or chat, turned into token ids and labels.

    {"text": "..."}                              every token trains
    {"prompt": "...", "completion": "..."}       the completion and the end-of-sequence token train
    {"messages": [{"role": .., "content": ..}]}  what the chat template writes for the assistant trains
    Alpaca, ShareGPT                             become one of these (chats.py)

Labels stand under their own token, as transformers expects: the model's loss shifts them by one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from moetune.data.bounded import bounded_memory
from moetune.data.chats import (
    MalformedError,
    alpaca_chat,
    alpaca_prompt,
    checked_messages,
    checked_text,
    checked_tools,
    kind,
    sharegpt_chat,
    with_alpaca_names,
)
from moetune.data.documents import Document, Documents
from moetune.data.sources import Source
from moetune.errors import UserError, one_line, reading, time_limit
from moetune.step.loss import IGNORED

LISTED_PROBLEMS = 20
_TEMPLATE_BYTES = 2**30  # of memory that a chat template may take
_TEMPLATE_SECONDS = 10.0  # that it may take for a record
LISTED_NUMBERS = 3
_MAY_BE_IGNORED = (("tool_calls",), ("function_call",), ("reasoning_content", "reasoning", "thinking"), ("name",))
"""Keys of a message that hold what was said and that not every template writes; several names of one thing together."""
Format = Literal["text", "prompt", "chat", "alpaca", "sharegpt"]
KEYS: dict[Format, tuple[str, ...]] = {
    "chat": ("messages",),
    "sharegpt": ("conversations",),
    "prompt": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
_ASKS = ("question", "query", "instruction", "input", "prompt", "problem", "user")
_ANSWERS = ("answer", "response", "output", "completion", "solution", "target", "assistant")
_TEXTS = ("content", "body", "document", "passage")
_READERS = {".jsonl": "from_json", ".json": "from_json", ".csv": "from_csv", ".parquet": "from_parquet"}


@dataclass
class Reading:
    """What became of the records of a source.

    Attributes:
        documents: where they are among all that were read, in the order of the source.
        dropped: records left out, those included of which no token to train on was left.
        cut: records whose end was left out.
    """

    documents: np.ndarray = field(default_factory=lambda: np.arange(0))
    dropped: int = 0
    cut: int = 0


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
            document = encoder.encode(record)
            if len(document) > longest and not document.divisible:
                if too_long == "error":
                    needed = max(needed, len(document))
                    raise MalformedError(f"{len(document)} tokens do not fit train.sequence_length {longest}")
                document = document.piece(0, longest)
                if too_long == "drop" or (document.labels == IGNORED).all():
                    read.dropped += 1
                    continue
                read.cut += 1
            documents.add(document)
        except MalformedError as problem:
            problems.add(row.number, one_line(problem))
    read.documents = np.arange(first, len(documents))
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
        self._encode: Callable[[dict[str, Any]], tuple[list[int], list[bool]]]
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
            self._encode = self._chat
            return
        if tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end-of-sequence token to put after a document")
        self._eos = [tokenizer.eos_token_id]
        first = tokenizer("a")["input_ids"][0]
        self._bos = [first] if first == tokenizer.bos_token_id else []
        self._encode = self._text if format == "text" else self._prompt

    def encode(self, record: dict[str, Any]) -> Document:
        """Ids and labels of one record.

        Raises:
            MalformedError: the record is not of this format, or nothing in it would train.
        """
        missing = [key for key in KEYS[self.format] if record.get(key) is None]
        if missing:
            found = ", ".join(key for key, value in record.items() if value is not None)
            raise MalformedError(f"no {' and no '.join(map(repr, missing))}; it holds {found or 'nothing'}")
        with reading("the record, by the tokenizer,"):
            ids, trains = self._encode(self._convert(record))
        labels = np.where(trains, ids, IGNORED).astype(np.int32)
        labels[:1] = IGNORED
        if (labels == IGNORED).all():
            raise MalformedError("no token to train on")
        return Document(np.asarray(ids, dtype=np.int32), labels, divisible=self.format == "text")

    def _text(self, record: dict[str, Any]) -> tuple[list[int], list[bool]]:
        body = self._tokens(checked_text(record["text"], "text"))
        if not body:
            raise MalformedError("text yields no token")
        ids = [*self._bos, *body, *self._eos]
        return ids, [True] * len(ids)

    def _prompt(self, record: dict[str, Any]) -> tuple[list[int], list[bool]]:
        # Tokenized apart, so that the boundary is exact: no token holds characters of both.
        prompt = [*self._bos, *self._tokens(checked_text(record["prompt"], "prompt"))]
        body = self._tokens(checked_text(record["completion"], "completion"))
        if not body:
            raise MalformedError("completion yields no token")
        completion = [*body, *self._eos]
        return [*prompt, *completion], [False] * len(prompt) + [True] * len(completion)

    def _chat(self, record: dict[str, Any]) -> tuple[list[int], list[bool]]:
        messages, tools = checked_messages(record["messages"]), checked_tools(record.get("tools"))
        try:
            with bounded_memory(_TEMPLATE_BYTES), time_limit("what it writes", _TEMPLATE_SECONDS):
                messages = self._with_content(messages, tools)
                self._refuse_ignored(messages, tools)
                find = self._marked_spans if self._has_markers else self._prefix_spans
                text, spans = find(messages, tools)
                spans = _weighted(messages, spans)
        except MalformedError:
            raise
        except Exception as error:  # templates can do what Python can do to a value
            raise MalformedError(f"the chat template refuses it: {one_line(error)}") from None
        if not isinstance(text, str) or len(text) > _TEMPLATE_BYTES // 16:
            raise MalformedError("the chat template writes more than any text")
        encoded = self.tokenizer(
            checked_text(text, "rendered chat"),
            add_special_tokens=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        trains = [False] * len(encoded["input_ids"])
        for index, (start, stop) in enumerate(encoded["offset_mapping"]):
            # Byte-level tokenizers may trim whitespace off an offset; of a token that is whitespace alone,
            # nothing but the position after it is left.
            first = start if stop > start else start - 1
            trains[index] = any(low <= first < high for low, high in spans)
        return encoded["input_ids"], trains

    def _refuse_ignored(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> None:
        """Refuse a chat of which the template leaves something out: it writes the same without it."""
        without: list[tuple[str, list[dict[str, Any]], list[Any] | None]] = []
        if tools:
            without.append(("tools", messages, None))
        for at, message in enumerate(messages):
            for names in _MAY_BE_IGNORED:
                # A tool's name stands in the call that it answers.
                here = [name for name in names if message.get(name) and (name, message["role"]) != ("name", "tool")]
                if here:
                    left = {key: value for key, value in message.items() if key not in here}
                    without.append(
                        (f"{here[0]} of message {at + 1}", [*messages[:at], left, *messages[at + 1 :]], tools)
                    )
        full = self._render(messages, tools) if without else ""
        for what, fewer, tools_left in without:
            try:
                is_lost = self._render(fewer, tools_left) == full
            except Exception:  # the template needs it
                continue
            if is_lost:
                raise MalformedError(
                    f"the chat template leaves out {what}, which would be lost; name a template that writes it in "
                    "data.chat_template, or take it out of the record"
                )

    def _with_content(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> list[dict[str, Any]]:
        """Content that is null stays so where the template knows it; where it would write `None` it becomes empty."""
        if all(message["content"] is not None for message in messages):
            return messages
        empty = [{**message, "content": message["content"] or ""} for message in messages]
        try:
            written = self._render(messages, tools)
        except Exception:  # templates can do what Python can do to a value
            return empty
        return empty if written.count("None") > self._render(empty, tools).count("None") else messages

    def _marked_spans(
        self, messages: list[dict[str, Any]], tools: list[Any] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The rendered chat, and which characters the template's `{% generation %}` blocks wrote.

        `apply_chat_template(return_assistant_tokens_mask=True)` reads the same blocks, but drops the rest of
        the chat when a block begins with a character that no token holds.
        """
        options: dict[str, Any] = {"return_assistant_tokens_mask": True, **self.tokenizer.special_tokens_map}
        rendered: Any = render_jinja_template([messages], tools, chat_template=self._template, **options)
        texts, spans = rendered
        return texts[0], [(low, high) for low, high in spans[0]]

    def _prefix_spans(
        self, messages: list[dict[str, Any]], tools: list[Any] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The same without markers: what `messages[:i+1]` adds to the generation prompt of `messages[:i]`."""
        full = self._render(messages, tools)
        spans = []
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
            if not (after.startswith(before) and full.startswith(after)):
                raise MalformedError(
                    f"the chat template writes message {index + 1} differently when it stands last, so what "
                    "is the assistant's cannot be told; give the template {% generation %} markers"
                )
            spans.append((len(before), len(after)))
        return full, spans

    def _render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, add_generation_prompt: bool = False
    ) -> str:
        rendered: Any = self.tokenizer.apply_chat_template(
            messages, tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return rendered

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


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
