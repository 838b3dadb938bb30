"""What a record means: text, prompt and completion, or chat, turned into token ids and labels.

    {"text": "..."}                              every token trains
    {"prompt": "...", "completion": "..."}       the completion and the end-of-sequence token train
    {"messages": [{"role": .., "content": ..}]}  what the chat template writes for the assistant trains

Labels stand under their own token, as transformers expects: the model's loss shifts them by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from moetune.errors import UserError, one_line, reading
from moetune.step.loss import IGNORED
from moetune.training.bounded import bounded_memory
from moetune.training.sources import Source

ROLES = ("system", "developer", "user", "assistant", "tool")
LISTED_PROBLEMS = 20
_TEMPLATE_BYTES = 2**30  # of memory that a chat template may take
Format = Literal["text", "prompt", "chat"]
KEYS: dict[Format, tuple[str, ...]] = {
    "chat": ("messages",),
    "prompt": ("prompt", "completion"),
    "text": ("text",),
}


class MalformedError(UserError):
    """One record cannot be used; the message says why."""


@dataclass(frozen=True)
class Document:
    """One record as tokens: `ids` and `labels`, int32 [length], at least 2 long.

    The first label is always `IGNORED`: a first token is predicted from nothing. A `divisible` document may
    be cut into several sequences; a prompt must stay with its completion.
    """

    ids: np.ndarray
    labels: np.ndarray
    divisible: bool

    def __len__(self) -> int:
        return len(self.ids)

    def piece(self, start: int, stop: int) -> Document:
        """Tokens `start` to `stop`, the first of them as context only."""
        labels = self.labels[start:stop].copy()
        labels[0] = IGNORED
        return Document(self.ids[start:stop], labels, self.divisible)


def read_documents(
    source: Source,
    format: Literal["auto", "text", "prompt", "chat"],
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
) -> list[Document]:
    """Tokenizes every record of a source.

    Args:
        source: the rows.
        format: how to read them; `auto` takes the format of the first record that has one, for all of them.
        tokenizer: must have an end-of-sequence token and, for chat, a chat template and offsets.
        longest: tokens that fit one sequence. Longer text is cut later; a longer prompt or chat is a problem.

    Raises:
        UserError: the source is empty, the tokenizer cannot serve, or records cannot be used: the first 20 of
            those are listed with their line or row number.
    """
    encoder: Encoder | None = None
    documents: list[Document] = []
    problems: list[str] = []
    needed = longest
    for row in source.rows:
        try:
            if row.problem is not None:
                raise MalformedError(row.problem)
            if not isinstance(row.value, dict):
                raise MalformedError(f"{_kind(row.value)}, not an object with keys")
            if encoder is None:
                with reading("the tokenizer"):
                    encoder = Encoder(tokenizer, _detect(row.value) if format == "auto" else format)
            document = encoder.encode(row.value)
            if len(document) > longest and not document.divisible:
                needed = max(needed, len(document))
                raise MalformedError(f"{len(document)} tokens do not fit train.sequence_length {longest}")
            documents.append(document)
        except MalformedError as problem:
            problems.append(f"  {source.unit} {row.number}: {one_line(problem)}")
    if problems:
        raise UserError(_summary(source.name, problems, needed if needed > longest else None))
    if not documents:
        raise UserError(f"{source.name!r} is empty: it holds no record")
    return documents


class Encoder:
    """Turns records of one format into documents."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, format: Format) -> None:
        self.tokenizer = tokenizer
        self.format = format
        self._encode: Callable[[dict[str, Any]], tuple[list[int], list[bool]]]
        if format == "chat":
            if not tokenizer.chat_template:
                raise UserError(
                    "the tokenizer has no chat template, so chat messages have no written form; "
                    "use a model tuned for chat, or give the data as text or prompt and completion"
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
            ids, trains = self._encode(record)
        labels = np.where(trains, ids, IGNORED).astype(np.int32)
        labels[:1] = IGNORED
        if (labels == IGNORED).all():
            raise MalformedError("no token to train on")
        return Document(np.asarray(ids, dtype=np.int32), labels, divisible=self.format == "text")

    def _text(self, record: dict[str, Any]) -> tuple[list[int], list[bool]]:
        body = self._tokens(_checked_text(record["text"], "text"))
        if not body:
            raise MalformedError("text yields no token")
        ids = [*self._bos, *body, *self._eos]
        return ids, [True] * len(ids)

    def _prompt(self, record: dict[str, Any]) -> tuple[list[int], list[bool]]:
        # Tokenized apart, so that the boundary is exact: no token holds characters of both.
        prompt = [*self._bos, *self._tokens(_checked_text(record["prompt"], "prompt"))]
        body = self._tokens(_checked_text(record["completion"], "completion"))
        if not body:
            raise MalformedError("completion yields no token")
        completion = [*body, *self._eos]
        return [*prompt, *completion], [False] * len(prompt) + [True] * len(completion)

    def _chat(self, record: dict[str, Any]) -> tuple[list[int], list[bool]]:
        messages = _checked_messages(record["messages"])
        try:
            with bounded_memory(_TEMPLATE_BYTES):
                text, spans = self._marked_spans(messages) if self._has_markers else self._prefix_spans(messages)
        except MalformedError:
            raise
        except Exception as error:  # templates can do what Python can do to a value
            raise MalformedError(f"the chat template refuses it: {one_line(error)}") from None
        if not isinstance(text, str) or len(text) > _TEMPLATE_BYTES // 16:
            raise MalformedError("the chat template writes more than any text")
        encoded = self.tokenizer(
            _checked_text(text, "rendered chat"),
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

    def _marked_spans(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """The rendered chat, and which characters the template's `{% generation %}` blocks wrote.

        `apply_chat_template(return_assistant_tokens_mask=True)` reads the same blocks, but drops the rest of
        the chat when a block begins with a character that no token holds.
        """
        options: dict[str, Any] = {"return_assistant_tokens_mask": True, **self.tokenizer.special_tokens_map}
        rendered: Any = render_jinja_template([messages], chat_template=self._template, **options)
        texts, spans = rendered
        return texts[0], [(low, high) for low, high in spans[0]]

    def _prefix_spans(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """The same without markers: what `messages[:i+1]` adds to the generation prompt of `messages[:i]`."""
        full = self._render(messages)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if index == 0:
                raise MalformedError(
                    "the assistant speaks first, and without {% generation %} markers in the chat template "
                    "nothing shows where its part begins"
                )
            before = self._render(messages[:index], add_generation_prompt=True)
            after = self._render(messages[: index + 1])
            if not (after.startswith(before) and full.startswith(after)):
                raise MalformedError(
                    f"the chat template writes message {index + 1} differently when it stands last, so what "
                    "is the assistant's cannot be told; give the template {% generation %} markers"
                )
            spans.append((len(before), len(after)))
        return full, spans

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        rendered: Any = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return rendered

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _detect(record: dict[str, Any]) -> Format:
    for format, keys in KEYS.items():
        if all(record.get(key) is not None for key in keys):
            return format
    raise MalformedError(
        f"it holds {', '.join(record) or 'nothing'}; a record needs 'text', 'prompt' and 'completion', or 'messages'"
    )


def _checked_text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise MalformedError(f"{what} is {_kind(value)}, not text")
    if not value.strip():
        raise MalformedError(f"{what} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise MalformedError(f"{what} holds half of a surrogate pair, which is no character") from None
    return value


def _checked_messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise MalformedError(f"messages is {_kind(value)}, not a list")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict):
            raise MalformedError(f"message {number} is {_kind(message)}, not an object with role and content")
        if message.get("role") not in ROLES:
            raise MalformedError(
                f"message {number}: unknown role {message.get('role')!r}; it may be {', '.join(ROLES)}"
            )
        content = message.get("content")
        if message["role"] == "assistant" or content != "":  # an empty system message is common, and harmless
            _checked_text(content, f"content of message {number}")
    if not any(message["role"] == "assistant" for message in value):
        raise MalformedError("no message of the assistant, so nothing to train on")
    return value


def _kind(value: object) -> str:
    """What JSON calls a value."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def _summary(name: str, problems: list[str], needed: int | None) -> str:
    count = f"{len(problems):,} records" if len(problems) > 1 else "1 record"
    lines = [f"{name!r}: {count} cannot be used", *problems[:LISTED_PROBLEMS]]
    if len(problems) > LISTED_PROBLEMS:
        lines.append(f"  and {len(problems) - LISTED_PROBLEMS:,} more")
    if needed is not None:
        lines.append(f"  prompts and chats are never cut: raise train.sequence_length to {needed}, or remove them")
    return "\n".join(lines)
