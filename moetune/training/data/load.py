"""A run's data: read, check and tokenize what `data:` names, lay it out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from moetune.config.schema import DataConfig, RunConfig, TrainConfig, data_sets
from moetune.errors import UserError, collected, counted, raise_problems, reading
from moetune.files import expanded
from moetune.models.hub.reach import hub_is_reachable
from moetune.models.source import ModelSource, find_model_source
from moetune.training.data.chats.stop_tokens import stop_tokens
from moetune.training.data.chats.template_arguments import fix_template
from moetune.training.data.documents import Chosen, Documents, values
from moetune.training.data.packing import packed, separate
from moetune.training.data.records import LENGTH, Reading, Tally, read_documents
from moetune.training.data.sources import Source, looks_like_a_file, open_sources
from moetune.training.data.tokenizer_files import load_tokenizer, template_in
from moetune.training.step.loss import IGNORED


@dataclass(kw_only=True)
class DataCounts(Tally):
    """Statistics of the training or the held-out data.

    Attributes:
        lengths: number of tokens of each document, int32 [documents].
        records: number of records that the documents come from.
        sequences: number of rows.
        tokens: tokens in all sequences, without padding; a token repeated at the start of a segment counts twice.
        loss_tokens: tokens that are predicted.
        padding: padding tokens in packed sequences.
        unread: a sentence for each way in which the data sets hold more than is read.
    """

    lengths: np.ndarray
    records: int
    sequences: int
    tokens: int
    loss_tokens: int
    padding: int
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Datasets:
    """Tokenized sequences on disk, not shuffled, and their statistics; `eval` is None if the run does not evaluate.

    `stops` are the tokens at which the model's generation ends; empty if the model is not known.
    `clock` is the time at which the chat template's clock stood; None if it reads none.
    """

    train: datasets.Dataset
    eval: datasets.Dataset | None
    counts: DataCounts
    eval_counts: DataCounts | None
    stops: frozenset[str] = frozenset()
    clock: datetime | None = None


def load_data(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    train: TrainConfig,
    now: datetime | None = None,
    length_from: str = LENGTH,
) -> Datasets:
    """Read and tokenize the training data and the held-out data.

    The same files, settings, tokenizer and time give exactly the same sequences. `tokenizer.chat_template` is replaced
    as `set_template` does; `now` is the time for a template that reads the clock, by default the current. `train` has
    the sequence length, and the seed of random choices; `length_from` is what messages call the length.

    Raises:
        UserError: data cannot be found or read, records cannot be used (all such problems, one per line), or the
            weight of a data set leaves none of its records, or `data.validation` none to train on.
    """
    problems: list[str] = []
    unread: tuple[list[str], list[str]] = [], []  # of the training data, of those held out
    documents = Documents()
    clock = set_template(tokenizer, data, now)

    def read(spec: str, held_out: bool) -> Reading:
        parts: list[Reading] = []
        note = unread[held_out].append
        sources: list[Source] = []
        with collected(problems):
            sources = open_sources(spec, held_out=held_out, note=note)
        for source in sources:
            with collected(problems):
                lengths = train.sequence_length, data.too_long
                parts.append(read_documents(source, data.format, tokenizer, *lengths, documents, note, length_from))
        return _joined(parts)

    named = data_sets(data.train, data.split), data_sets(data.eval)
    readings = {(spec, held_out): read(spec, held_out) for held_out in (False, True) for spec in dict(named[held_out])}
    raise_problems(problems)
    draw = np.random.default_rng(train.seed)
    training, held_out = (
        _joined([_times(spec, readings[spec, held_out], weight, draw) for spec, weight in named[held_out]])
        for held_out in (False, True)
    )
    if data.validation is not None:
        training, held_out = _split(training, data.validation, draw)
    hashes = np.array(documents.hashes)
    if twice := int(np.isin(hashes[held_out.documents], hashes[training.documents]).sum()):
        unread[1].append(f"{twice:,} of {len(held_out.documents):,} held-out documents are trained on too")
    distinct = np.unique(training.documents)  # a weight repeats documents
    if again := len(distinct) - len(np.unique(hashes[distinct])):
        unread[0].append(f"{again:,} of {len(distinct):,} training documents are repetitions of others")
    if (data.chat_template or data.template) and not (training.tally.chats or held_out.tally.chats):
        unread[0].append(
            "data.chat_template and data.template are not used: text, and prompts that are text, have none"
        )
    length, padding = train.sequence_length, pad_token_id(tokenizer) if data.packing else None
    special = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    unknown = tokenizer.unk_token_id if tokenizer.unk_token_id not in special else None
    laid = (documents, length, padding, unknown)
    rows, counts = _laid(training, *laid, unread[0])
    held_rows, held_counts = _laid(held_out, *laid, unread[1]) if data.evaluates else (None, None)
    return Datasets(rows, held_rows, counts, held_counts, clock=clock)


def data_of(
    config: RunConfig, source: ModelSource, settings: PretrainedConfig, now: datetime | None = None
) -> tuple[Datasets, PreTrainedTokenizerBase]:
    """Return the data of a run, tokenized for a model with transformers' configuration `settings`, and the tokenizer of
    `source`. The run file must have a `data:` section. `now` is as for `load_data`.

    Raises:
        UserError: the tokenizer cannot be loaded, data cannot be found, read or used, or a token id is not below the
            model's vocabulary size or stands for a part of an image, a video or a sound.
    """
    assert config.data is not None
    tokenizer = tokenizer_of(source.name, source.folder)
    data = load_data(config.data, tokenizer, config.train, now)
    refuse_unknown_tokens(settings, config.model.path, pad_token_id(tokenizer), data.train, data.eval)
    return replace(data, stops=stop_tokens(tokenizer, settings, source.folder)), tokenizer


def tokenizer_of(name: str, folder: str | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer in `folder`, a folder or a name on the hub; `name` is the model's, for messages.

    Raises:
        UserError: the tokenizer cannot be loaded (`folder` may be None); transformers would replace it by another
            (tokenizer_files.py), or its replacement rules could make a text over 1000 times as long.
    """
    if folder is None:
        raise UserError(f"model {name!r} has no tokenizer: it is not published; give a folder that has one")
    with reading(f"the tokenizer of {name!r} in {folder!r}"):
        on_disk = Path(folder).is_dir() or not hub_is_reachable()
        return load_tokenizer(folder, on_disk)


def set_template(tokenizer: PreTrainedTokenizerBase, data: DataConfig, now: datetime | None = None) -> datetime | None:
    """Give a tokenizer the chat template of a run file: `data.chat_template` with the arguments of `data.template`.

    Its clock stands at `now`, by default the current time. Returns this time if the template reads the clock, or None.

    Raises:
        UserError: there is no such template, or it reads no such argument.
    """
    if data.chat_template is not None:
        tokenizer.chat_template = chat_template(data.chat_template)
    return fix_template(tokenizer, data.template, now or datetime.now())


def chat_template(spec: str) -> str:
    """Return the text of the chat template that `spec`, the value of `data.chat_template`, names: a file, or a model
    whose tokenizer has one.

    Raises:
        UserError: there is no such file or model, or the model's tokenizer has no template.
    """
    file = expanded(spec)
    if file.is_file():
        with reading(f"data.chat_template: {spec!r}"):
            return template_in(file)
    if not file.is_dir() and (looks_like_a_file(spec) or file.suffix in (".jinja", ".j2")):
        raise UserError(f"data.chat_template: no such file: {spec!r}")
    source = find_model_source(spec)
    tokenizer = tokenizer_of(source.name, source.folder)
    if not tokenizer.chat_template:
        raise UserError(f"data.chat_template: the tokenizer of {spec!r} has none")
    return tokenizer.get_chat_template()


def _joined(parts: Sequence[Reading]) -> Reading:
    """Concatenate the documents of several `Reading`s and sum their counts."""
    return Reading(
        np.concatenate([np.arange(0), *(part.documents for part in parts)]),
        np.concatenate([np.arange(0), *(part.records for part in parts)]),
        sum((part.tally for part in parts), Tally()),
    )


def _times(spec: str, read: Reading, weight: float, draw: np.random.Generator) -> Reading:
    """Repeat the records of the data set `spec` by its weight: with 2.3, all of them twice, and 30 % of them, drawn by
    `draw`, once more. Raise `UserError` if none is left."""
    whole, rest = divmod(weight, 1)
    records = np.unique(read.records)
    if not whole and not round(rest * len(records)):
        raise UserError(f"{spec!r}: a weight of {weight:g} leaves none of its records ({len(records):,}); raise it")
    drawn = draw.permutation(len(records))[: round(rest * len(records))] if rest else np.arange(0)
    again = np.flatnonzero(np.isin(read.records, records[drawn]))
    return _taken(read, np.concatenate([np.tile(np.arange(len(read.records)), int(whole)), again]))


def _split(read: Reading, share: float, draw: np.random.Generator) -> tuple[Reading, Reading]:
    """Split records at random into a training part and a held-out part; no record is in both.

    The held-out part has the fraction `share` of the distinct records, at least one, and each once. Raise `UserError`
    if no record is left to train on.
    """
    _, firsts = np.unique(read.records, return_index=True)  # a weight repeats records
    records = read.records[np.sort(firsts)]
    count = max(1, round(share * len(records)))
    if count >= len(records):
        raise UserError(f"data.validation: {share:g} of {len(records)} records leaves none to train on")
    is_held = np.isin(read.records, records[draw.permutation(len(records))[:count]])
    once = np.sort(np.unique(read.documents, return_index=True)[1])
    held = _taken(read, once[is_held[once]])
    return _taken(read, np.flatnonzero(~is_held)), Reading(held.documents, held.records)


def _taken(read: Reading, at: np.ndarray) -> Reading:
    """Return a copy of `read` that lists only the documents at its positions `at`, int64, which may repeat."""
    return replace(read, documents=read.documents[at], records=read.records[at])


def _laid(
    read: Reading, documents: Documents, length: int, padding: int | None, unknown: int | None, unread: list[str]
) -> tuple[datasets.Dataset, DataCounts]:
    """Lay documents out in sequences of at most `length` tokens; return the rows and their statistics.

    Args:
        padding: id of the padding token of packed sequences; None puts each document in sequences of its own.
        unknown: id of the token for characters that the tokenizer does not know; None if there is none.
        unread: a sentence for each way in which the data sets hold more than is read; one is added if characters are
            not known.
    """
    chosen = Chosen(documents, read.documents)
    rows = separate(chosen, length) if padding is None else packed(chosen, length, padding)
    positions = sum(map(len, values(rows, "input_ids")))
    if unknown is not None and (count := sum(int((part == unknown).sum()) for part in values(rows, "input_ids"))):
        unread.append(f"{counted(count, 'token')} for characters that the tokenizer does not know (its unk_token)")
    tokens = positions if padding is None else sum(int(part.sum()) for part in values(rows, "is_token"))
    return rows, DataCounts(
        **vars(read.tally),
        lengths=documents.lengths[read.documents],
        records=int((read.documents == read.records).sum()),
        sequences=len(rows),
        tokens=tokens,
        loss_tokens=sum(int((part != IGNORED).sum()) for part in values(rows, "labels")),
        padding=positions - tokens,
        unread=tuple(unread),
    )


def refuse_unknown_tokens(
    settings: PretrainedConfig, model: str, padding: int, *parts: datasets.Dataset | None
) -> None:
    """Raise `UserError` if a token id in `parts`, or the padding token, is not below the model's vocabulary size; or if
    one stands for a part of an image, a video or a sound.

    `settings` is transformers' configuration of the model, `model` its name for messages, `padding` the padding token's
    id, and `parts` are tokenized rows.
    """
    known = settings.get_text_config().vocab_size
    kinds = ("image", "video", "audio")
    ids: dict[Any, str] = {
        getattr(settings, f"{kind}_token_{key}", None): kind for kind in kinds for key in ("id", "index")
    }
    largest = 0
    for tokens in (tokens for part in parts if part is not None for tokens in values(part, "input_ids")):
        largest = max(largest, int(tokens.max()))
        if foreign := ids.keys() & {*np.unique(tokens).tolist()}:
            token = min(foreign)
            raise UserError(
                f"the data of {model!r} hold token {token}, which stands for {ids[token]} input, and only text is "
                "read; leave these records out"
            )
    if max(largest, padding) >= known:
        what = "pads with" if padding >= known else "gives"
        raise UserError(
            f"the tokenizer of {model!r} {what} token {max(largest, padding)}; the model has embeddings for {known} "
            "only. Its tokenizer_config.json says which tokens there are"
        )


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the padding token, or else of the end-of-sequence token; `UserError` if there is neither."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    raise UserError("the tokenizer has neither a padding nor an end-of-sequence token to fill a sequence with")
