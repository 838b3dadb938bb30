"""Preview of a run's data: first documents token by token, statistics, an epoch's steps."""

from collections.abc import Collection
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from moetune.config.schema import RunConfig
from moetune.errors import UserError, counted
from moetune.models.source import find_model_source
from moetune.parallel.coordinates import data_ranks
from moetune.training.data.chats.chat_template import MARKINGS
from moetune.training.data.chats.stop_tokens import end_notes, turn_ends
from moetune.training.data.load import DataCounts, Datasets, data_of
from moetune.training.folder.run_folder import RunFolder
from moetune.training.step.loss import IGNORED

BINS = 12
SHOWN_TOKENS = 400
"""Maximum number of tokens of a document that the preview shows."""


def preview(config: RunConfig, records: int = 3) -> tuple[str, dict[str, Any]]:
    """Read and tokenize a run's data as training does; return the model's name, and what `moetune data --json` prints.

    If there is a run in the output folder, a chat template that reads the clock writes the date of this run.

    Args:
        records: number of training documents of which the first tokens are shown, as (text, whether it has a loss).

    Raises:
        UserError: the run file has no `data:` section, or the data cannot be used.
    """
    if config.data is None:
        raise UserError("moetune data needs data: in the run file")
    source = find_model_source(config.model.path)
    began = None if config.output is None else RunFolder(Path(config.output)).clock()
    data, tokenizer = data_of(config, source, source.config, began)
    return source.name, {
        "schema": 1,
        "train": _counts_json(data.counts, data.stops),
        "eval": None if data.eval_counts is None else _counts_json(data.eval_counts, data.stops),
        "sequence_length": config.train.sequence_length,
        "sequences_a_step": config.train.micro_batch * config.train.accumulate * data_ranks(config.parallel),
        "steps_an_epoch": steps_an_epoch(data.counts.sequences, config),
        "stop_tokens": sorted(data.stops),
        "notes": notes(data),
        "first": _first(data, tokenizer, records),
    }


def steps_an_epoch(sequences: int, config: RunConfig) -> int:
    """Return the number of optimizer steps in which every one of `sequences` rows is seen once; the last may have fewer
    rows."""
    micro_batches = ceil(ceil(sequences / config.train.micro_batch) / data_ranks(config.parallel))
    return ceil(micro_batches / config.train.accumulate)


def notes(data: Datasets) -> list[str]:
    """Return sentences on chats, none without them: how the assistant's part was found, turns that begin with another
    generation prompt, which tokens end turns, a warning if one does not end generation, and the template's date;
    and what data sets hold that is not read."""
    lines = [f"{counted(count, 'chat')}: {MARKINGS[marking]}" for marking, count in data.counts.chats.items()]
    for setting, count in data.counts.settings.items():
        if setting:
            lines.append(
                f"{counted(count, 'turn')} of the assistant with the generation prompt of {setting}, which has no "
                f"loss; set data.template: {{{setting}}}, and generate, chat and exports use this prompt too"
            )
        else:
            lines.append(
                f"{counted(count, 'chat')} in which the assistant does not begin with the template's generation "
                "prompt, after which the model will answer: give thoughts, or another data.chat_template"
            )
    lines += end_notes(turn_ends(data.counts.ends, data.stops), data.stops)
    if lines and data.clock is not None:
        lines.append(f"the chat template writes the date {data.clock:%Y-%m-%d}; a run keeps that of its first day")
    held_out = () if data.eval_counts is None else data.eval_counts.unread
    return [*lines, *data.counts.unread, *held_out]


def _counts_json(counts: DataCounts, stops: Collection[str]) -> dict[str, Any]:
    """Return the statistics as a JSON object; `ends` is token -> number of turns that end with it (`turn_ends`).

    `lengths` has minimum, median, maximum and a histogram: (shortest, longest, number of documents) for up to `BINS`
    bins of equal width, in tokens.
    """
    longest = int(counts.lengths.max())
    width = ceil((longest + 1) / min(BINS, longest))
    bins = enumerate(np.bincount(counts.lengths // width))
    return {
        "documents": len(counts.lengths),
        **vars(counts),
        "chats": dict(counts.chats),
        "ends": turn_ends(counts.ends, stops),
        "settings": dict(counts.settings),
        "lengths": {
            "shortest": int(counts.lengths.min()),
            "median": float(np.median(counts.lengths)),
            "longest": longest,
            "histogram": [(index * width, (index + 1) * width - 1, int(count)) for index, count in bins],
        },
    }


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
