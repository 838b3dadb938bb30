"""The `data:` section of a run file, read, checked, tokenized and laid into sequences.

Everything that can be wrong with the data is found here, before any weight is loaded. The steps have a file
each: `sources` (where records come from), `records` (what they mean), `packing` (how they fill sequences).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import datasets
import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from moetune.anatomy.source import find_model_source
from moetune.config import DataConfig, TrainConfig, WeightedData
from moetune.data.packing import packed, separate
from moetune.data.records import Document, Reading, read_documents
from moetune.data.sources import looks_like_a_file, open_sources
from moetune.errors import UserError, reading
from moetune.files import expanded
from moetune.step.loss import IGNORED


@dataclass(frozen=True)
class DataCounts:
    """What became of the records of a data set.

    Attributes:
        lengths: tokens of each document, int64.
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
    """Tokenized sequences, in memory, in the order of the records. Shuffling is the trainer's."""

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
    if data.chat_template is not None:
        tokenizer.chat_template = chat_template(data.chat_template)

    def read(spec: str) -> Reading:
        parts: list[Reading] = []
        try:
            for source in open_sources(spec):
                try:
                    parts.append(read_documents(source, data.format, tokenizer, train.sequence_length, data.too_long))
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
    if not training.documents:
        raise UserError("data.train: the weights leave no record; raise them")
    rows, counts = _laid(training, data, train.sequence_length, tokenizer)
    held_rows, held_counts = _laid(held_out, data, train.sequence_length, tokenizer) if data.evaluates else (None, None)
    return Datasets(rows, held_rows, counts, held_counts)


def tokenizer_of(name: str, folder: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer in a model's folder.

    Raises:
        UserError: it cannot be loaded.
    """
    with reading(f"the tokenizer of {name!r} in {folder!r}"):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def chat_template(spec: str) -> str:
    """The template that `data.chat_template` names: a file, or a model whose tokenizer has one.

    Raises:
        UserError: there is no such file or model, or it has none.
    """
    file = expanded(spec)
    if file.is_file():
        with reading(f"data.chat_template: {spec!r}"):
            return file.read_text(encoding="utf-8")
    if looks_like_a_file(spec) or file.suffix in (".jinja", ".j2"):
        raise UserError(f"data.chat_template: no such file: {spec!r}")
    source = find_model_source(spec)
    tokenizer = tokenizer_of(source.name, source.folder)
    if not tokenizer.chat_template:
        raise UserError(f"data.chat_template: the tokenizer of {spec!r} has none")
    return tokenizer.get_chat_template()


def _weighted(part: str | Sequence[str | WeightedData] | None) -> list[tuple[str, float]]:
    """What a key of the run file names, and how often each of its records is taken."""
    specs = [] if part is None else [part] if isinstance(part, str) else part
    return [(one, 1.0) if isinstance(one, str) else (one.path, one.weight) for one in specs]


def _joined(parts: Sequence[Reading]) -> Reading:
    documents = [*chain.from_iterable(part.documents for part in parts)]
    return Reading(documents, sum(part.dropped for part in parts), sum(part.cut for part in parts))


def _times(read: Reading, weight: float, draw: np.random.Generator) -> Reading:
    """Every document `weight` times, and of what is left over a share that is drawn."""
    whole, rest = divmod(weight, 1)
    drawn = draw.permutation(len(read.documents))[: round(rest * len(read.documents))] if rest else ()
    documents = read.documents * int(whole) + [read.documents[index] for index in sorted(drawn)]
    return replace(read, documents=documents)


def _split(read: Reading, share: float, draw: np.random.Generator) -> tuple[Reading, Reading]:
    """The training and the held-out part of documents, none of which is in both."""
    documents = list(dict.fromkeys(read.documents))  # weights have some more than once
    count = max(1, round(share * len(documents)))
    if count >= len(documents):
        raise UserError(f"data.validation: {share:g} of {len(documents)} records leaves none to train on")
    held = {documents[index] for index in draw.permutation(len(documents))[:count]}
    return (
        replace(read, documents=[one for one in read.documents if one not in held]),
        Reading([one for one in documents if one in held]),
    )


def _laid(
    read: Reading, data: DataConfig, length: int, tokenizer: PreTrainedTokenizerBase
) -> tuple[datasets.Dataset, DataCounts]:
    """Documents in sequences, and what there is of everything."""
    documents: list[Document] = read.documents
    rows = packed(documents, length, pad_token_id(tokenizer)) if data.packing else separate(documents, length)
    columns = {name: rows.data.column(name).combine_chunks().flatten().to_numpy() for name in rows.column_names}
    tokens = int(columns["is_token"].sum()) if data.packing else len(columns["input_ids"])
    counts = DataCounts(
        lengths=np.array([len(one) for one in documents]),
        dropped=read.dropped,
        cut=read.cut,
        sequences=len(rows),
        tokens=tokens,
        loss_tokens=int((columns["labels"] != IGNORED).sum()),
        padding=len(columns["input_ids"]) - tokens,
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
