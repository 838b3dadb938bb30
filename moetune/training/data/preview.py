"""Preview of a run's data: the first documents token by token, statistics, and the steps of an epoch."""

from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from moetune.config.schema import RunConfig
from moetune.errors import UserError, counted
from moetune.models.source import find_model_source
from moetune.parallel.coordinates import data_ranks
from moetune.training.data.chat_template import MARKINGS
from moetune.training.data.load import DataCounts, Datasets, data_of
from moetune.training.step.loss import IGNORED

BINS = 12
SHOWN_TOKENS = 400
"""Maximum number of tokens of a document that the preview shows."""


@dataclass(frozen=True)
class Preview:
    """The data of a run, as `moetune data` shows it.

    Attributes:
        name: the model's name.
        first: for each of some training documents its first tokens, as (text of the token, whether it has a loss).
        counts: statistics of the training data.
        held_out: statistics of the held-out data; None if the run does not evaluate.
        sequences_a_step: rows of an optimizer step, over all ranks.
        steps_an_epoch: optimizer steps in which every sequence is seen once.
    """

    name: str
    sequence_length: int
    first: list[list[tuple[str, bool]]]
    counts: DataCounts
    held_out: DataCounts | None
    sequences_a_step: int
    steps_an_epoch: int

    def to_json(self) -> dict[str, Any]:
        """Return the object that `moetune data --json` prints."""
        parts = {"train": self.counts, "eval": self.held_out}
        return {
            "schema": 1,
            **{name: None if counts is None else counts_json(counts) for name, counts in parts.items()},
            "sequence_length": self.sequence_length,
            "sequences_a_step": self.sequences_a_step,
            "steps_an_epoch": self.steps_an_epoch,
            "notes": [*notes(self.counts), *(self.held_out.unread if self.held_out is not None else ())],
            "first": self.first,
        }


def preview(config: RunConfig, records: int = 3) -> Preview:
    """Read and tokenize a run's data as training does; keep the first tokens of `records` documents to show.

    Raises:
        UserError: the run file has no `data:` section, or the data cannot be used.
    """
    if config.data is None:
        raise UserError("moetune data needs data: in the run file")
    source = find_model_source(config.model.path)
    data, tokenizer = data_of(config, source, source.config)
    return Preview(
        name=source.name,
        sequence_length=config.train.sequence_length,
        first=_first(data, tokenizer, records),
        counts=data.counts,
        held_out=data.eval_counts,
        sequences_a_step=sequences_a_step(config),
        steps_an_epoch=steps_an_epoch(data.counts.sequences, config),
    )


def sequences_a_step(config: RunConfig) -> int:
    """Return the number of rows of an optimizer step, over all ranks."""
    return config.train.micro_batch * config.train.accumulate * data_ranks(config.parallel)


def steps_an_epoch(sequences: int, config: RunConfig) -> int:
    """Return the number of optimizer steps in which every one of `sequences` rows is seen once; the last may have fewer
    rows."""
    micro_batches = ceil(ceil(sequences / config.train.micro_batch) / data_ranks(config.parallel))
    return ceil(micro_batches / config.train.accumulate)


def histogram(counts: DataCounts) -> list[tuple[int, int, int]]:
    """Return (shortest length, longest length, number of documents) for up to `BINS` bins of equal width, in tokens."""
    longest = int(counts.lengths.max())
    width = ceil((longest + 1) / min(BINS, longest))
    found = np.bincount(counts.lengths // width)
    return [(index * width, (index + 1) * width - 1, int(count)) for index, count in enumerate(found)]


def notes(counts: DataCounts) -> list[str]:
    """Return a sentence for each way in which the assistant's part of chats was found, and what was not read."""
    return [
        *(f"{counted(count, 'chat')}: {MARKINGS[marking]}" for marking, count in counts.chats.items()),
        *counts.unread,
    ]


def counts_json(counts: DataCounts) -> dict[str, Any]:
    """Return the statistics as a JSON object; `lengths` becomes minimum, median, maximum and a histogram."""
    lengths = counts.lengths
    summary = {
        "shortest": int(lengths.min()),
        "median": float(np.median(lengths)),
        "longest": int(lengths.max()),
        "histogram": histogram(counts),
    }
    return {"documents": len(lengths), **vars(counts), "chats": dict(counts.chats), "lengths": summary}


def _first(data: Datasets, tokenizer: PreTrainedTokenizerBase, records: int) -> list[list[tuple[str, bool]]]:
    documents: list[list[tuple[str, bool]]] = []
    for row in data.train:
        ids, labels = np.array(row["input_ids"]), np.array(row["labels"])
        starts = np.flatnonzero(np.array(row["position_ids"]) == 0) if "position_ids" in row else np.array([0])
        end = int(np.sum(row["is_token"])) if "is_token" in row else len(ids)
        for start, stop in zip(starts, [*starts[1:], end], strict=True):
            if start >= end:
                break
            if len(documents) == records:
                return documents
            shown = slice(start, min(stop, end, start + SHOWN_TOKENS))
            documents.append([*zip(_texts(tokenizer, ids[shown]), (labels[shown] != IGNORED).tolist(), strict=True)])
    return documents


def _texts(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> list[str]:
    """Return the text that each token of `ids`, int32 [tokens], adds; of several tokens that make up one character the
    last adds it, and the others ""."""
    texts, before = [], ""
    for count in range(1, len(ids) + 1):
        text: Any = tokenizer.decode(ids[:count].tolist(), clean_up_tokenization_spaces=False)
        if text.endswith("�") and count < len(ids):
            texts.append("")
            continue
        texts.append(text[len(before) :])
        before = text
    return texts
