"""Tokenize records of one format into documents of token ids and labels.

    {"text": "..."}                              every token is trained on
    {"prompt": "...", "completion": "..."}       the completion and the end-of-sequence token are trained on
    {"messages": [{"role": .., "content": ..}]}  what the chat template writes for the assistant is trained on
    Alpaca, ShareGPT                             are converted to one of these (formats.py)

A label has the same position as its token; the loss shifts the labels by one.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from moetune.errors import UserError, counted, first_of, reading
from moetune.training.data.chats.chat_template import ChatTemplate, Written
from moetune.training.data.chats.marks import REASONING
from moetune.training.data.chats.thinking import refuse_cut
from moetune.training.data.chats.tool_calls import checked_tools
from moetune.training.data.conversion import (
    alpaca_chat,
    alpaca_prompt,
    chat_of,
    checked_messages,
    sharegpt_chat,
)
from moetune.training.data.documents import Document
from moetune.training.data.values import MalformedError, checked_text
from moetune.training.step.loss import IGNORED

Format = Literal["text", "prompt", "chat", "alpaca", "sharegpt"]
KEYS: dict[Format, tuple[str, ...]] = {
    "chat": ("messages",),
    "sharegpt": ("conversations",),
    "prompt": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
_ALSO = dict.fromkeys(("chat", "sharegpt"), ("system", "tools", "functions")) | {
    "alpaca": ("input", "system", "history", *REASONING)
}
"""Keys that are read besides, if the record has them."""
Tokens = tuple[np.ndarray, np.ndarray]
"""Token ids [length], and for each token whether it is trained on [length]."""
_ODD = {
    "U+FFFD, which programs write for bytes that they cannot decode": re.compile("\ufffd"),
    "a backspace or form feed before a letter, as where JSON had \\beta or \\frac": re.compile(r"[\b\f](?=[a-z])"),
    "no more than nan, which programs write for no value": re.compile(r"\A\s*(?:nan|NaN|<NA>)\s*\Z"),
}
"""What is odd about a text, and the pattern by which it is found."""
_TAG = re.compile(r"\s*(<[^<>\s]+>|\[[A-Z_]+\])")
"""A tag at the beginning of a message, such as <tool_response> or [INST]."""
_WINDOW = 2**18
"""Characters tokenized in one call; tokenizers take 200 bytes of memory or more per character."""


def format_of(record: dict[str, Any]) -> Format:
    """Return the first format in `KEYS` whose keys the record has; raise `MalformedError` if there is none."""
    for format, keys in KEYS.items():
        if all(record.get(key) is not None for key in keys):
            return format
    raise MalformedError(
        f"it holds {_held(record)}; a record needs 'text', 'prompt' and 'completion', 'messages', "
        "'instruction' and 'output' (Alpaca), or 'conversations' (ShareGPT)"
    )


def _held(record: dict[str, Any]) -> str:
    return ", ".join(key or repr(key) for key, value in record.items() if value is not None) or "nothing"


class Encoder:
    """Converts records of one `format` to documents, by `encode`.

    Raises:
        UserError: the tokenizer lacks what the format needs: an end-of-sequence token or, for chats, a chat template
            and character offsets.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, format: Format) -> None:
        self.tokenizer, self.format = tokenizer, format
        self._unread: set[str] = set()  # keys of records, or of their messages
        self._undeclared: list[str] = []  # of each chat with calls of such tools one
        self._spelled: set[str] = set()
        self._unanswered = 0
        self._wrapped: Counter[str] = Counter()  # tags that the template writes before messages that begin with them
        self._odd: Counter[str] = Counter()
        self._special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        if format == "text":  # these begin and end texts that are no chats, too
            self._special -= {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
        # Thousands that differ in a number alone, as Gemma's <unused0>, would be as many tries at each "<" of a text.
        shapes = {re.sub(r"[0-9]+", "[0-9]+", re.escape(token)) for token in self._special}
        self._like_special = re.compile("|".join(sorted(shapes)) or r"(?!)")
        self._template: ChatTemplate | None = None
        if format in ("chat", "sharegpt") or (format == "alpaca" and tokenizer.chat_template):
            if not tokenizer.is_fast:
                raise UserError("chat data needs a tokenizer with offsets (a tokenizer.json file); this one has none")
            self._template = ChatTemplate(tokenizer)
            return
        if tokenizer.eos_token_id is None:
            raise UserError(
                "the tokenizer has no end-of-sequence token to put after a document: name it in tokenizer_config.json, "
                "as eos_token"
            )
        self._bos, self._eos = bos_of(tokenizer), [tokenizer.eos_token_id]

    def encode(self, record: dict[str, Any]) -> tuple[list[Document], Written | None]:
        """Return the documents of a record (a chat may give several), and the chat as the template writes it; None if
        the record is no chat.

        Raises:
            MalformedError: the record is not of this format, or no token of it is trained on.
            UserError: the tokenizer fails on the record.
        """
        missing = [key for key in KEYS[self.format] if record.get(key) is None]
        if missing:
            raise MalformedError(f"no {' and no '.join(map(repr, missing))}; it holds {_held(record)}")
        read = (*KEYS[self.format], *_ALSO.get(self.format, ()))
        self._unread.update(key or repr(key) for key in record.keys() - read if record[key] not in (None, "", [], {}))
        if self.format == "sharegpt":
            record = sharegpt_chat(record)
        elif self.format == "alpaca":
            record = alpaca_prompt(record) if self._template is None else alpaca_chat(record)
        elif self.format == "chat":
            record = chat_of(record)
        written: Written | None = None
        with reading("the record, by the tokenizer,"):
            texts = [text for key in ("text", "prompt", "completion") if isinstance(text := record.get(key), str)]
            if self._template is not None:
                messages, tools = checked_messages(record["messages"]), checked_tools(record.get("tools"))
                declared = {tool["function"]["name"] for tool in tools or ()}
                called = [call["function"]["name"] for turn in messages for call in turn.get("tool_calls") or ()]
                self._undeclared += [name for name in called if name not in declared][:1]
                texts = [message["content"] for message in messages]
                self._unanswered += messages[-1]["role"] != "assistant"
                written = self._template.write(messages, tools)
                self._unread |= {f"{key} (of messages)" for key in self._template.unread_keys(messages)}
                parts = [self._spanned(text, spans) for text, spans in written.texts]
                self._wrapped.update(_written_twice(texts, written.texts[-1][0]))
            else:
                parts = [self._text(record) if self.format == "text" else self._prompt(record)]
        if self._template is not None or self.format == "text":
            self._spelled.update(*(self._special.intersection(self._like_special.findall(text)) for text in texts))
        self._odd.update(what for what, pattern in _ODD.items() for text in texts if pattern.search(text))
        documents = []
        for ids, trains in parts:
            labels = np.where(trains, ids, IGNORED).astype(np.int32)
            labels[:1] = IGNORED
            if (labels != IGNORED).any():
                documents.append(Document(ids, labels, divisible=self.format == "text"))
        if not documents:
            raise MalformedError("no token to train on")
        return documents, written

    def notes(self) -> Iterator[str]:
        """Yield a sentence for each thing about the records encoded so far that a user may not expect."""
        if self._unread:
            yield f"keys whose values are not read: {', '.join(first_of(sorted(self._unread)))}"
        if names := self._undeclared:
            yield f"{counted(len(names), 'chat')} with calls of tools that its `tools` lacks, as {names[0]}"
        if spelled := ", ".join(first_of(sorted(self._spelled))):
            chats = f"text with {spelled}, the loss on all of it: of chats that were rendered, give messages"
            yield chats if self.format == "text" else f"messages spell special tokens, and become them: {spelled}"
        if self._unanswered:
            yield f"{counted(self._unanswered, 'chat')} ending with a message that nobody answers"
        for tag, number in self._wrapped.items():
            yield f"{counted(number, 'message')} beginning with {tag}, which the chat template writes before it again"
        for what, number in self._odd.items():
            yield f"{counted(number, 'text')} with {what}"

    def _text(self, record: dict[str, Any]) -> Tokens:
        ids = begun(self._bos, self._ended(self._checked(record, "text")))
        return ids, np.arange(len(ids)) >= len(self._bos)

    def _prompt(self, record: dict[str, Any]) -> Tokens:
        if lost := [key for key in ("system", "history", "tools", *REASONING) if record.get(key)]:
            raise MalformedError(f"{' and '.join(lost)} beside prompt and completion would be lost; write messages")
        # Tokenized separately, so that no token has characters of both prompt and completion.
        completion = checked_text(record["completion"], "completion")
        asked = checked_text(record["prompt"], "prompt")
        refuse_cut("<think>" * asked.rstrip().endswith("<think>") + completion, "completion")
        prompt = begun(self._bos, self._tokens(asked))
        ids = _joined(prompt, self._ended(self._checked(record, "completion")))
        return ids, np.arange(len(ids)) >= len(prompt)

    def _ended(self, ids: np.ndarray) -> np.ndarray:
        """Return the ids with the end-of-sequence token, which the text may have spelled, at the end."""
        return ids if ids[-1:].tolist() == self._eos else _joined(ids, self._eos)

    def _checked(self, record: dict[str, Any], key: str) -> np.ndarray:
        ids = self._tokens(checked_text(record[key], key))
        if not len(ids):
            raise MalformedError(f"{key} yields no token")
        return ids

    def _spanned(self, text: str, spans: list[tuple[int, int]]) -> Tokens:
        """Tokenize a text; return token ids, and for each token whether it is trained on.

        These are the tokens within `spans`, [start, end) character ranges.

        The text is cut at the end of every span and the pieces are tokenized separately, as a prompt is tokenized
        before its answer is generated, so that no token crosses such an end. If that changes the text, because the
        tokenizer puts a space before each piece, the text is tokenized as a whole.

        Raises:
            MalformedError: the text is tokenized as a whole, and a token crosses the end of a span.
        """
        spans = [span for span in spans if span[0] < span[1]]
        begins = {begin for begin, _ in spans}
        ends = [0, *sorted({end for span in spans for end in span}), len(text)]
        segments, trains = [], []
        for low, high in itertools.pairwise(ends):
            segments.append(self._tokens(text[low:high]))
            trains.append(np.full(len(segments[-1]), low in begins))
        ids, whole = _joined(*segments), self._tokens(text)
        if np.array_equal(ids, whole) or self._decoded(ids) == self._decoded(whole):
            return ids, np.concatenate(trains)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        whole, offsets = (np.array(encoded[key], dtype=np.int32) for key in ("input_ids", "offset_mapping"))
        starts, stops = offsets.T
        # Some tokenizers give a whitespace token an empty range after its character.
        firsts = np.where(stops > starts, starts, starts - 1)
        for end in ends:
            for start, stop in offsets[(starts < end) & (end < stops)]:
                # Some control tokens hold the white space after them (Phi-3's).
                if text[start:stop].rstrip() in self.tokenizer.get_added_vocab():
                    continue
                raise MalformedError(
                    f"the token of {text[start:stop]!r} holds the end of one message's part and the beginning of the "
                    "next; name a template in data.chat_template that parts them by a special token"
                )
        return whole, np.any([(low <= firsts) & (firsts < high) for low, high in [(0, 0), *spans]], axis=0)

    def _decoded(self, ids: np.ndarray) -> str:
        text: Any = self.tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)
        return text

    def _tokens(self, text: str) -> np.ndarray:
        windows = (self.tokenizer(part, add_special_tokens=False, verbose=False) for part in _windows(text))
        # Arrays at once: a list takes 40 bytes a token.
        return _joined(*(np.asarray(window["input_ids"], dtype=np.int32) for window in windows))


def _written_twice(contents: list[str], chat: str) -> Iterator[str]:
    """Yield the tag of each content that begins with one, and has it before it in `chat`, as the template writes it."""
    for content, tag in ((content.strip(), match[1]) for content in contents if (match := _TAG.match(content))):
        if chat[: max(chat.find(content), 0)].rstrip().endswith(tag):
            yield tag


def bos_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that a tokenizer puts before a text, as a beginning-of-sequence token; nothing if it adds
    none."""
    text, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(text)] == text), [])


def begun(bos: list[int], ids: np.ndarray) -> np.ndarray:
    """Return the ids of a text behind `bos`, unless the text spells these tokens itself."""
    return ids if ids[: len(bos)].tolist() == bos else _joined(bos, ids)


def _windows(text: str) -> Iterator[str]:
    """Yield parts of at most `_WINDOW` characters, cut after a line feed, else before a space, if there is one."""
    begin = 0
    while len(text) - begin > _WINDOW:
        end = begin + _WINDOW
        cut = text.rfind("\n", begin, end) + 1 or text.rfind(" ", begin + 1, end)
        end = cut if cut > begin else end
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _joined(*parts: np.ndarray | list[int]) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])
