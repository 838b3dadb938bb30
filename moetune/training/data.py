"""The `data:` section of a run file, read, checked, tokenized and laid into sequences.

Everything that can be wrong with the data is found here, before any weight is loaded. The steps have a file
each: `sources` (where records come from), `records` (what they mean), `packing` (how they fill sequences).
"""

from __future__ import annotations

from dataclasses import dataclass

import datasets
from transformers import PreTrainedTokenizerBase

from moetune.config import DataConfig, TrainConfig
from moetune.errors import UserError
from moetune.training.packing import packed, separate
from moetune.training.records import read_documents
from moetune.training.sources import open_source


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
