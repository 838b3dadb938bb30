"""The `data:` section of a run file, read, checked, tokenized and laid into sequences.

Everything that can be wrong with the data is found here, before any weight is loaded. The steps have a file
each: `sources` (where records come from), `records` (what they mean), `packing` (how they fill sequences).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from moetune.anatomy.source import find_model_source
from moetune.config import DataConfig, TrainConfig, WeightedData
from moetune.data.documents import Chosen, Documents, values
from moetune.data.packing import packed, separate
from moetune.data.records import Reading, read_documents
from moetune.data.sources import Row, Source, looks_like_a_file, open_sources
from moetune.errors import UserError, reading
from moetune.files import expanded
from moetune.hub.reach import hub_is_reachable
from moetune.step.loss import IGNORED

_PATIENCE = 10.0  # seconds


@dataclass(frozen=True)
class DataCounts:
    """What became of the records of a data set.

    Attributes:
        lengths: tokens of each document, int32.
        dropped, cut: records that were too long.
        sequences: rows to train on.
        tokens: in these, padding left out; of a document that was cut into several, the context counts again.
        loss_tokens: those of them that are predicted.
        padding: tokens that fill sequences; without packing, batches are padded, and it is 0.
    """

    lengths: np.ndarray
    dropped: int
    cut: int
    sequences: int
    tokens: int
    loss_tokens: int
    padding: int


@dataclass(frozen=True)
class Datasets:
    """Tokenized sequences, on disk, in the order of the records. Shuffling is the trainer's."""

    train: datasets.Dataset
    eval: datasets.Dataset | None
    counts: DataCounts
    eval_counts: DataCounts | None


def load_data(data: DataConfig, tokenizer: PreTrainedTokenizerBase, train: TrainConfig) -> Datasets:
    """Reads both data sets. The same files and tokenizer give the same sequences, byte for byte.

    Raises:
        UserError: what is wrong with either of them, all of it together.
    """
    problems: dict[str, None] = {}
    documents = Documents()
    if data.chat_template is not None:
        tokenizer.chat_template = chat_template(data.chat_template)

    def read(spec: str) -> Reading:
        parts: list[Reading] = []
        try:
            for source in open_sources(spec):
                try:
                    source = replace(source, rows=_announced(source))
                    parts.append(
                        read_documents(source, data.format, tokenizer, train.sequence_length, data.too_long, documents)
                    )
                except UserError as error:
                    problems[str(error)] = None
        except UserError as error:
            problems[str(error)] = None
        return _joined(parts)

    one_by_spec = {spec: read(spec) for spec, _ in (*_weighted(data.train), *_weighted(data.eval))}
    if problems:
        raise UserError("\n".join(problems))
    draw = np.random.default_rng(train.seed)
    training, held_out = (
        _joined([_times(one_by_spec[spec], weight, draw) for spec, weight in _weighted(part)])
        for part in (data.train, data.eval)
    )
    if data.validation is not None:
        training, held_out = _split(training, data.validation, draw)
    if not len(training.documents):
        raise UserError("data.train: the weights leave no record; raise them")
    length, padding = train.sequence_length, pad_token_id(tokenizer) if data.packing else None
    rows, counts = _laid(training, documents, length, padding)
    held_rows, held_counts = _laid(held_out, documents, length, padding) if data.evaluates else (None, None)
    return Datasets(rows, held_rows, counts, held_counts)


def tokenizer_of(name: str, folder: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer in a model's folder.

    Raises:
        UserError: it cannot be loaded.
    """
    with reading(f"the tokenizer of {name!r} in {folder!r}"):
        on_disk = folder is None or Path(folder).is_dir() or not hub_is_reachable()
        return AutoTokenizer.from_pretrained(folder, local_files_only=on_disk, trust_remote_code=False)


def chat_template(spec: str) -> str:
    """The template that `data.chat_template` names: a file, or a model whose tokenizer has one.

    Raises:
        UserError: there is no such file or model, or it has none.
    """
    file = expanded(spec)
    if file.is_file():
        with reading(f"data.chat_template: {spec!r}"):
            return file.read_text(encoding="utf-8")
    if not file.is_dir() and (looks_like_a_file(spec) or file.suffix in (".jinja", ".j2")):
        raise UserError(f"data.chat_template: no such file: {spec!r}")
    source = find_model_source(spec)
    tokenizer = tokenizer_of(source.name, source.folder)
    if not tokenizer.chat_template:
        raise UserError(f"data.chat_template: the tokenizer of {spec!r} has none")
    return tokenizer.get_chat_template()


def _announced(source: Source) -> Iterator[Row]:
    """Its rows. Where reading takes long, stderr hears how far it is, at ever longer intervals."""
    begun, wait = time.monotonic(), _PATIENCE
    for count, row in enumerate(source.rows):
        if time.monotonic() - begun > wait:
            print(f"reading {source.name!r}: {count:,} records in {wait:.0f} s", file=sys.stderr)
            wait *= 2
        yield row


def _weighted(part: str | Sequence[str | WeightedData] | None) -> list[tuple[str, float]]:
    """What a key of the run file names, and how often each of its records is taken."""
    specs = [] if part is None else [part] if isinstance(part, str) else part
    return [(one, 1.0) if isinstance(one, str) else (one.path, one.weight) for one in specs]


def _joined(parts: Sequence[Reading]) -> Reading:
    documents = np.concatenate([np.arange(0), *(part.documents for part in parts)])
    return Reading(documents, sum(part.dropped for part in parts), sum(part.cut for part in parts))


def _times(read: Reading, weight: float, draw: np.random.Generator) -> Reading:
    """Every document `weight` times, and of what is left over a share that is drawn."""
    whole, rest = divmod(weight, 1)
    drawn = draw.permutation(len(read.documents))[: round(rest * len(read.documents))] if rest else np.arange(0)
    again = np.tile(read.documents, int(whole))
    return replace(read, documents=np.concatenate([again, read.documents[np.sort(drawn)]]))


def _split(read: Reading, share: float, draw: np.random.Generator) -> tuple[Reading, Reading]:
    """The training and the held-out part of documents, none of which is in both."""
    _, firsts = np.unique(read.documents, return_index=True)  # weights have some more than once
    documents = read.documents[np.sort(firsts)]
    count = max(1, round(share * len(documents)))
    if count >= len(documents):
        raise UserError(f"data.validation: {share:g} of {len(documents)} records leaves none to train on")
    held = documents[draw.permutation(len(documents))[:count]]
    return (
        replace(read, documents=read.documents[~np.isin(read.documents, held)]),
        Reading(documents[np.isin(documents, held)]),
    )


def _laid(read: Reading, documents: Documents, length: int, padding: int | None) -> tuple[datasets.Dataset, DataCounts]:
    """Documents in sequences, packed if there is a token to fill them with, and what there is of everything."""
    chosen = Chosen(documents, read.documents)
    rows = separate(chosen, length) if padding is None else packed(chosen, length, padding)
    there = sum(map(len, values(rows, "input_ids")))
    tokens = there if padding is None else sum(int(part.sum()) for part in values(rows, "is_token"))
    counts = DataCounts(
        lengths=documents.lengths[read.documents],
        dropped=read.dropped,
        cut=read.cut,
        sequences=len(rows),
        tokens=tokens,
        loss_tokens=sum(int((part != IGNORED).sum()) for part in values(rows, "labels")),
        padding=there - tokens,
    )
    return rows, counts


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that fills what is left of a sequence: the padding token, or else the end-of-sequence token.

    Raises:
        UserError: it has neither.
    """
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    raise UserError("the tokenizer has neither a padding nor an end-of-sequence token to fill a sequence with")
