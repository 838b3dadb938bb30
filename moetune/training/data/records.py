"""Tokenize a source's records into documents, and summarize the unusable ones."""

import re
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from moetune.errors import UserError, counted, first_of, one_line, reading
from moetune.training.data.chats.chat_template import Marking
from moetune.training.data.conversion import with_known_keys
from moetune.training.data.documents import Documents
from moetune.training.data.encoder import Encoder, format_of
from moetune.training.data.files.source import Note, Source
from moetune.training.data.values import MalformedError, kind
from moetune.training.step.loss import IGNORED

_MOST_PROBLEMS, _MOST_NUMBERS = 20, 3
_PATIENCE = 10.0  # seconds until progress is reported first


@dataclass(kw_only=True)
class Tally:
    """What became of records and chats.

    Attributes:
        dropped: number of documents left out: they are too long, or cutting left no token to train on.
        cut: number of documents that were truncated because they are too long.
        unended: number of cut documents that end before the completion, or the assistant's first message, does.
        chats: key of `MARKINGS`, how the assistant's text was found -> number of chats.
        ends: control tokens at the end of a turn of the assistant -> number of turns.
        settings: setting of `data.template` -> number of turns that begin with its generation prompt (`Thinking`); ""
            -> that of chats whose first begins with none.
    """

    dropped: int = 0
    cut: int = 0
    unended: int = 0
    chats: Counter[Marking] = field(default_factory=Counter)
    ends: Counter[tuple[str, ...]] = field(default_factory=Counter)
    settings: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(**{key: value + getattr(other, key) for key, value in vars(self).items()})


@dataclass
class Reading:
    """The documents of a source, as indices into the `Documents` that they were added to.

    Attributes:
        documents: indices of the documents that are not dropped, int64 [documents], in the order of the source.
        records: for each of them, the index of the first one of the same record, int64 [documents]; a chat may have
            several documents.
    """

    documents: np.ndarray
    records: np.ndarray
    tally: Tally = field(default_factory=Tally)


LENGTH = "train.sequence_length"


def read_documents(
    source: Source,
    format: Literal["auto", "text", "prompt", "chat", "alpaca", "sharegpt"],
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    too_long: Literal["error", "drop", "truncate"],
    documents: Documents,
    note: Note,
    length_from: str = LENGTH,
) -> Reading:
    """Tokenize every record of a source and add its documents to `documents`; report progress on stderr after 10, 20,
    40 … seconds.

    Args:
        format: format of all records; `auto` detects it from the first record that has the keys of one.
        longest: maximum tokens of a prompt with its completion, or of a chat. Longer plain text is cut into several
            sequences later.
        length_from: the setting that says `longest`, for messages: `LENGTH`, or an option of a command.
        too_long: whether a longer prompt or chat is reported as an error, dropped, or truncated.

    Raises:
        UserError: the source is empty, or all of its records are dropped as too long; the tokenizer lacks what the
            format needs; or records cannot be used. The message lists them with their line or row numbers; records with
            the same problem share a line.
    """
    encoder: Encoder | None = None
    tally, first, records = Tally(), len(documents), []
    problems, needed = _Problems(), longest
    begun, wait = time.monotonic(), _PATIENCE
    for count, row in enumerate(source.rows):
        if time.monotonic() - begun > wait:
            print(f"reading {source.name!r}: {count:,} records in {wait:.0f} s", file=sys.stderr)
            wait *= 2
        try:
            if row.problem is not None:
                raise MalformedError(row.problem)
            if not isinstance(row.value, dict):
                raise MalformedError(f"{kind(row.value)}, not an object with keys")
            record = with_known_keys(row.value)
            if encoder is None:
                with reading("the tokenizer"):
                    encoder = Encoder(tokenizer, format_of(record) if format == "auto" else format)
            encoded, written = encoder.encode(record)
            if written:
                tally.chats[written.marking] += 1
                tally.ends.update(written.ends)
                tally.settings.update(written.settings)
            of_record = len(documents)
            for document in encoded:
                if len(document) > longest and not document.divisible:
                    if too_long == "error":
                        needed = max(needed, *map(len, encoded))
                        raise MalformedError(f"{needed} tokens do not fit {length_from} {longest}")
                    document, whole = document.shortened(longest)
                    if too_long == "drop" or (document.labels == IGNORED).all():
                        tally.dropped += 1
                        continue
                    tally.cut += 1
                    tally.unended += not whole
                documents.add(document)
                records.append(of_record)
        except MalformedError as problem:
            problems.add(row.number, one_line(problem))
    if problems.count:
        hints = []
        if needed > longest:
            others = ", or set data.too_long: drop or truncate" if length_from == LENGTH else ""
            hints.append(f"  prompts and chats are not cut by themselves: raise {length_from} to {needed}{others}")
        raise UserError("\n".join((*problems.summary(source), *hints)))
    if not records:
        why = f"all of its {tally.dropped:,} records are longer than {length_from} {longest}"
        raise UserError(f"{source.name!r} " + (why if tally.dropped else "is empty: it holds no record"))
    for text in encoder.notes() if encoder is not None else ():
        note(f"{source.name!r}: {text}")
    return Reading(np.arange(first, len(documents)), np.array(records, dtype=np.int64), tally)


class _Problems:
    """Collects the problems of records; messages that differ only in numbers are one, with the numbers of the first."""

    def __init__(self) -> None:
        self.count = 0
        self._alike: dict[str, tuple[str, array[int]]] = {}

    def add(self, number: int, problem: str) -> None:
        """Add the problem of the record with this line or row number."""
        self.count += 1
        text = re.sub(r"\d+", "#", problem)
        if text in self._alike or len(self._alike) < _MOST_PROBLEMS:
            self._alike.setdefault(text, (problem, array("q")))[1].append(number)

    def summary(self, source: Source) -> Iterator[str]:
        """Yield the lines of a message about all problems; `source` gives its name and what the numbers count."""
        yield f"{source.name!r}: {counted(self.count, 'record')} cannot be used"
        for problem, numbers in self._alike.values():
            where = ", ".join(first_of([*map(str, numbers)], _MOST_NUMBERS))
            yield f"  {source.unit}{'s' if len(numbers) > 1 else ''} {where}: {problem}"
        if rest := self.count - sum(len(numbers) for _, numbers in self._alike.values()):
            yield f"  and {rest:,} more"
