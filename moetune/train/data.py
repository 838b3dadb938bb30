"""The `data:` section of a run file, read, checked, tokenized and laid into sequences; then into batches.

Everything that can be wrong with the data is found here, before any weight is loaded. The steps have a file
each: `sources` (where records come from), `records` (what they mean), `packing` (how they fill sequences).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from transformers import PreTrainedTokenizerBase

from moetune.config import DataConfig, TrainConfig
from moetune.errors import UserError
from moetune.step.loss import IGNORED
from moetune.train.packing import packed, separate
from moetune.train.records import read_documents
from moetune.train.sources import open_source


@dataclass(frozen=True)
class Datasets:
    """Tokenized sequences, in memory, in the order of the records. Shuffling is the trainer's."""

    train: datasets.Dataset
    eval: datasets.Dataset | None


def load_data(data: DataConfig, tokenizer: PreTrainedTokenizerBase, train: TrainConfig) -> Datasets:
    """Reads both data sets. The same files and tokenizer give the same sequences, byte for byte.

    Raises:
        UserError: what is wrong with either of them, all of it together.
    """
    loaded: list[datasets.Dataset] = []
    problems: list[str] = []
    for spec in dict.fromkeys(spec for spec in (data.train, data.eval) if spec is not None):
        try:
            documents = read_documents(open_source(spec), data.format, tokenizer, train.sequence_length)
            if data.packing:
                loaded.append(packed(documents, train.sequence_length, pad_token_id(tokenizer)))
            else:
                loaded.append(separate(documents, train.sequence_length))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    return Datasets(train=loaded[0], eval=None if data.eval is None else loaded[-1])


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that fills what is left of a sequence: the padding token, or else the end-of-sequence token.

    Raises:
        UserError: it has neither.
    """
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    raise UserError("the tokenizer has neither a padding nor an end-of-sequence token to fill a sequence with")


def collate(items: Sequence[dict[str, Any]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """One micro-batch of B sequences, int64 [B, T].

    Packed items give `input_ids`, `labels`, `position_ids` and `is_token` (0 for padding; not for the model), and no
    `attention_mask`: transformers keeps documents apart only without one, and only when the model is called with
    `use_cache=False`. `isolation` checks that a model does. All T are equal then: no further padding.
    Other items are padded on the right to the longest of the batch and get an `attention_mask`.
    """
    if "position_ids" in items[0]:
        return {name: torch.tensor([item[name] for item in items]) for name in items[0]}
    longest = max(len(item["input_ids"]) for item in items)
    shape = (len(items), longest)
    batch = {
        "input_ids": torch.full(shape, pad_token_id),
        "labels": torch.full(shape, IGNORED),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
    }
    for row, item in enumerate(items):
        length = len(item["input_ids"])
        batch["input_ids"][row, :length] = torch.tensor(item["input_ids"])
        batch["labels"][row, :length] = torch.tensor(item["labels"])
        batch["attention_mask"][row, :length] = 1
    return batch
