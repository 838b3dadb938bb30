"""Documents laid into sequences: packed to a fixed length, or one to a sequence.

A document longer than a sequence is cut, and each further piece begins with the last token of the one before,
as context that carries no loss. So every token but a document's first is predicted exactly once, and each
piece has at least two tokens, hence something to train on.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence

import datasets
import numpy as np
import pyarrow as pa

from moetune.data.records import Document
from moetune.step.loss import IGNORED

SHORTEST_PIECE = 2
"""One token of context and one to predict."""


def packed(documents: Sequence[Document], length: int, pad_token_id: int) -> datasets.Dataset:
    """Sequences of exactly `length` tokens that hold several documents each.

    `position_ids` start at 0 with every document; that is how attention tells them apart. What is left of a
    sequence is filled with padding, which counts as one more document and carries no loss.

    Returns:
        Columns `input_ids`, `labels`, `position_ids` and `is_token` (1, or 0 for padding), each int32 [length] a row.
    """
    sequences = _pack_stream((one for one in documents if one.divisible), length)
    sequences += _pack_whole((one for one in documents if not one.divisible), length)
    shape = (len(sequences), length)
    ids = np.full(shape, pad_token_id, dtype=np.int32)
    labels = np.full(shape, IGNORED, dtype=np.int32)
    positions = np.empty(shape, dtype=np.int32)
    is_token = np.zeros(shape, dtype=np.int32)
    for row, pieces in enumerate(sequences):
        end = 0
        for piece in pieces:
            start, end = end, end + len(piece)
            ids[row, start:end] = piece.ids
            labels[row, start:end] = piece.labels
            positions[row, start:end] = np.arange(len(piece))
        positions[row, end:] = np.arange(length - end)
        is_token[row, :end] = 1
    return _dataset({"input_ids": ids, "labels": labels, "position_ids": positions, "is_token": is_token})


def separate(documents: Iterable[Document], length: int) -> datasets.Dataset:
    """One document a sequence, of at most `length` tokens; longer ones are cut.

    Returns:
        Columns `input_ids` and `labels`, int32 lists as long as the piece. Padding is for the batch to add.
    """
    pieces = [piece for document in documents for piece in _cut(document, length)]
    return _dataset({"input_ids": [piece.ids for piece in pieces], "labels": [piece.labels for piece in pieces]})


def _cut(document: Document, length: int) -> list[Document]:
    # Each piece after the first repeats one token, so starts are length - 1 apart.
    starts = range(0, max(len(document) - 1, 1), length - 1)
    return [document.piece(start, start + length) for start in starts]


def _pack_stream(documents: Iterable[Document], length: int) -> list[list[Document]]:
    """Fills sequences in order, cutting a document wherever a sequence ends."""
    sequences: list[list[Document]] = []
    free = 0
    for document in documents:
        start = 0
        while start < len(document) - 1:
            if free < SHORTEST_PIECE:
                sequences.append([])
                free = length
            piece = document.piece(start, start + free)
            sequences[-1].append(piece)
            free -= len(piece)
            start += len(piece) - 1
    return sequences


def _pack_whole(documents: Iterable[Document], length: int) -> list[list[Document]]:
    """Best fit, in the order given: each document goes whole into the fullest sequence with room for it."""
    sequences: list[list[Document]] = []
    open_sequences: list[tuple[int, int]] = []  # (free tokens, index), sorted
    for document in documents:
        at = bisect.bisect_left(open_sequences, (len(document), 0))
        if at < len(open_sequences):
            free, index = open_sequences.pop(at)
        else:
            free, index = length, len(sequences)
            sequences.append([])
        sequences[index].append(document)
        free -= len(document)
        if free >= SHORTEST_PIECE:
            bisect.insort(open_sequences, (free, index))
    return sequences


def _dataset(columns: Mapping[str, Iterable[np.ndarray]]) -> datasets.Dataset:
    """A row an array. In memory: nothing is cached on disk, so nothing can be stale."""
    return datasets.Dataset(pa.table({name: _list_array(list(rows)) for name, rows in columns.items()}))


def _list_array(rows: Sequence[np.ndarray]) -> pa.ListArray:
    # Straight from numpy: `Dataset.from_dict` goes through Python objects, at several times the memory.
    offsets = np.cumsum([0, *map(len, rows)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(np.concatenate(rows)))
