"""Rows of tokens collated into batches; random rows for traces and measurements."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from moetune.training.step.loss import IGNORED

Batch = Mapping[str, Tensor]
"""Tensors [B, S] by name: `input_ids`, `labels`, and either `attention_mask` or `position_ids` and `is_token`."""

Row = Mapping[str, ArrayLike]
"""Columns of one row, of equal length: `input_ids`, `labels`, and in packed rows `position_ids` and `is_token`."""


def collate(
    rows: Sequence[Row],
    pad_token_id: int,
    *,
    at_least: int = 0,
    document_inputs: Callable[[Sequence[int]], dict[str, Any]] = lambda lengths: {},
) -> dict[str, Any]:
    """Return a micro-batch of B rows as int64 tensors [B, S] by name.

    Packed rows, which have equal lengths, are stacked with their `position_ids` and `is_token` (0 for padding; not an
    input of the model). They get no `attention_mask`: without one, and with `use_cache=False`, transformers separates
    documents by their positions. Other rows are padded on the right to the longest, with an `attention_mask`; each
    is one document, because causal attention hides what is on the right anyway.

    Args:
        pad_token_id: the id that fills `input_ids` in padding; labels there are `IGNORED`.
        at_least: minimum length, in tokens, to which rows that are not packed are padded.
        document_inputs: returns further inputs of the model, such as `cu_seqlens`, from the lengths of all documents
            in tokens, row by row; made by `document_inputs(model)` in adapt/attention.py.
    """
    columns = {name: [np.asarray(row[name], np.int64) for row in rows] for name in rows[0]}
    if "position_ids" in columns:
        batch: dict[str, Any] = {name: torch.tensor(np.stack(column)) for name, column in columns.items()}
        lengths = [length for positions in columns["position_ids"] for length in _lengths(positions)]
        return batch | document_inputs(lengths)
    longest = max(at_least, *map(len, columns["input_ids"]))

    def padded(column: list[np.ndarray], filling: int) -> Tensor:
        whole = np.full((len(column), longest), filling)
        for row, values in zip(whole, column, strict=True):
            row[: len(values)] = values
        return torch.tensor(whole)

    batch = {
        "input_ids": padded(columns["input_ids"], pad_token_id),
        "labels": padded(columns["labels"], IGNORED),
        "attention_mask": padded([np.ones_like(ids) for ids in columns["input_ids"]], 0),
    }
    return batch | document_inputs([longest] * len(rows))


def uncounted(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a batch whose tokens count neither in the loss nor in the expert load: `labels` all `IGNORED`,
    `is_token` all 0."""
    labels = batch["labels"]
    return batch | {"labels": torch.full_like(labels, IGNORED), "is_token": torch.zeros_like(labels)}


def collate_evenly(
    parts: Sequence[tuple[Sequence[Row], bool]], size: int, count: int, collate: Callable[..., dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return `count` micro-batches of `size` rows and equal length, as the stages of a pipeline need them.

    Missing rows and micro-batches are filled with copies of others that count neither in the loss nor in the expert
    load.

    Args:
        parts: (rows, whether they count) of each micro-batch; at most `count`.
        collate: `collate` with its other arguments.
    """
    longest = max(len(np.asarray(row["input_ids"])) for rows, _ in parts for row in rows)
    batches = []
    for rows, counts in [*parts, *[(parts[0][0], False)] * (count - len(parts))]:
        batch, counted = collate([*rows, *[rows[0]] * (size - len(rows))], at_least=longest), len(rows) * counts
        batch["is_token"] = batch["is_token" if "is_token" in batch else "attention_mask"].clone()
        batch["labels"][counted:] = IGNORED
        batch["is_token"][counted:] = 0
        batches.append(batch)
    return batches


def _lengths(positions: np.ndarray) -> list[int]:
    """Return the lengths of the documents in a row; `positions` [S] restart at 0 with every document."""
    return np.diff(np.flatnonzero(positions == 0), append=len(positions)).tolist()


def random_rows(count: int, length: int, vocabulary: int, *, packing: bool) -> list[Row]:
    """Return `count` rows of `length` random tokens below `vocabulary`, with the keys of a data set's rows.

    With `packing`, each row contains two documents. Otherwise the first row is one token shorter than `length`, so that
    the batch has padding and an attention mask.
    """
    ids = [*np.random.default_rng(random.getrandbits(64)).integers(vocabulary, size=(count, length))]
    if not packing:
        ids[0] = ids[0][:-1]
        return [{"input_ids": row, "labels": row} for row in ids]
    positions = np.concatenate([np.arange(length // 2), np.arange(length - length // 2)])
    is_token = np.ones(length, np.int64)
    return [{"input_ids": row, "labels": row, "position_ids": positions, "is_token": is_token} for row in ids]
