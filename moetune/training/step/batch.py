"""Rows of tokens become a batch: the same for data and for rows that are made up to be traced or measured."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from moetune.adapt.attention import cu_seqlens
from moetune.training.step.loss import IGNORED

Batch = Mapping[str, Tensor]
"""`input_ids` and `labels` [B, S], and either `attention_mask` or `position_ids` and `is_token`, [B, S] too."""

Row = Mapping[str, ArrayLike]
"""`input_ids` and `labels`, and of one with several documents `position_ids` and `is_token`; all equally long."""


def collate(
    rows: Sequence[Row], pad_token_id: int, *, at_least: int = 0, documents_by_cu_seqlens: bool = False
) -> dict[str, Any]:
    """One micro-batch of B rows, int64 [B, S].

    Packed rows give `input_ids`, `labels`, `position_ids` and `is_token` (0 for padding; not for the model), and no
    `attention_mask`: transformers keeps documents apart only without one, and only when the model is called with
    `use_cache=False`. `isolation` checks that a model does. A model whose attention makes no mask is told by cu_seqlens
    (adapt/attention.py) instead. All are equally long then: no further padding.
    Other rows are padded on the right to the longest of the batch, or to `at_least` so many tokens, and get an
    `attention_mask`.
    """
    columns = {name: [np.asarray(row[name], np.int64) for row in rows] for name in rows[0]}
    if "position_ids" in columns:
        batch: dict[str, Any] = {name: torch.tensor(np.stack(column)) for name, column in columns.items()}
        lengths = [length for positions in columns["position_ids"] for length in _lengths(positions)]
        return batch | cu_seqlens(lengths) if documents_by_cu_seqlens else batch
    longest = max(at_least, *map(len, columns["input_ids"]))

    def padded(column: list[np.ndarray], filling: int) -> Tensor:
        whole = np.full((len(column), longest), filling)
        for row, values in zip(whole, column, strict=True):
            row[: len(values)] = values
        return torch.tensor(whole)

    return {
        "input_ids": padded(columns["input_ids"], pad_token_id),
        "labels": padded(columns["labels"], IGNORED),
        "attention_mask": padded([np.ones_like(ids) for ids in columns["input_ids"]], 0),
    }


def uncounted(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch as one whose tokens give no loss and no expert load."""
    labels = batch["labels"]
    return batch | {"labels": torch.full_like(labels, IGNORED), "is_token": torch.zeros_like(labels)}


def _lengths(positions: np.ndarray) -> list[int]:
    """Of the documents of a row, whose positions begin at 0."""
    return np.diff(np.flatnonzero(positions == 0), append=len(positions)).tolist()


def random_rows(count: int, length: int, vocabulary: int, *, packing: bool) -> list[Row]:
    """Rows as a data set gives them, of random tokens: two documents each if packed, else the first one a token shorter
    than `length`, so that a batch needs padding and attention a mask."""
    ids = [*np.random.default_rng(random.getrandbits(64)).integers(vocabulary, size=(count, length))]
    if not packing:
        ids[0] = ids[0][:-1]
        return [{"input_ids": row, "labels": row} for row in ids]
    positions = np.concatenate([np.arange(length // 2), np.arange(length - length // 2)])
    is_token = np.ones(length, np.int64)
    return [{"input_ids": row, "labels": row, "position_ids": positions, "is_token": is_token} for row in ids]
