"""Documents laid into sequences: packed to a fixed length, or one to a sequence.

A document longer than a sequence is cut, and each further piece begins with the last token of the one before,
as context that carries no loss. So every token but a document's first is predicted exactly once, and each
piece has at least two tokens, hence something to train on.
"""

from __future__ import annotations

import bisect
import heapq
from array import array
from collections.abc import Iterator, Sequence

import datasets
import numpy as np

from moetune.training.data.documents import Block, Document, rows_on_disk
from moetune.training.step.loss import IGNORED

SHORTEST_PIECE = 2
"""One token of context and one to predict."""
_BLOCK_TOKENS = 2**20
"""Of the rows that are in memory at once, about."""


def packed(documents: Sequence[Document], length: int, pad_token_id: int) -> datasets.Dataset:
    """Sequences of exactly `length` tokens that hold several documents each.

    `position_ids` start at 0 with every document; that is how attention tells them apart. What is left of a
    sequence is filled with padding, which counts as one more document and carries no loss.

    Returns:
        Columns `input_ids`, `labels`, `position_ids` and `is_token` (1, or 0 for padding), each int32 [length] a row.
    """
    pieces = _Pieces()
    _pack_stream(documents, length, pieces)
    _pack_whole(documents, length, pieces)
    blocks = _packed_blocks(documents, pieces, length, pad_token_id)
    return rows_on_disk(("input_ids", "labels", "position_ids", "is_token"), blocks)


def separate(documents: Sequence[Document], length: int) -> datasets.Dataset:
    """One document a sequence, of at most `length` tokens; longer ones are cut.

    Returns:
        Columns `input_ids` and `labels`, int32 lists as long as the piece. Padding is for the batch to add.
    """
    return rows_on_disk(("input_ids", "labels"), _separate_blocks(documents, length))


class _Pieces:
    """Which tokens of which document are in which sequence: 32 bytes a piece."""

    def __init__(self) -> None:
        self.sequences = 0
        self._parts = [array("q") for _ in range(4)]

    def new_sequence(self) -> int:
        self.sequences += 1
        return self.sequences - 1

    def add(self, sequence: int, document: int, start: int, stop: int) -> None:
        for part, value in zip(self._parts, (sequence, document, start, stop), strict=True):
            part.append(value)

    def by_sequence(self) -> Iterator[list[tuple[int, int, int]]]:
        """(document, start, stop) of each sequence's pieces, in the order in which they came."""
        sequences, *parts = (np.frombuffer(part, np.int64) for part in self._parts)
        order = np.argsort(sequences, kind="stable")
        ends = np.cumsum(np.bincount(sequences, minlength=self.sequences))
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            here = order[start:end]
            yield [*zip(*(part[here].tolist() for part in parts), strict=True)]


def _packed_blocks(documents: Sequence[Document], pieces: _Pieces, length: int, pad_token_id: int) -> Iterator[Block]:
    most = max(1, _BLOCK_TOKENS // length)
    sequences = pieces.by_sequence()
    for first in range(0, pieces.sequences, most):
        shape = (min(most, pieces.sequences - first), length)
        ids = np.full(shape, pad_token_id, dtype=np.int32)
        labels = np.full(shape, IGNORED, dtype=np.int32)
        positions = np.empty(shape, dtype=np.int32)
        is_token = np.zeros(shape, dtype=np.int32)
        for row, sequence in zip(range(shape[0]), sequences, strict=False):
            end = 0
            for document, low, high in sequence:
                piece = documents[document].piece(low, high)
                start, end = end, end + len(piece)
                ids[row, start:end] = piece.ids
                labels[row, start:end] = piece.labels
                positions[row, start:end] = np.arange(len(piece))
            positions[row, end:] = np.arange(length - end)
            is_token[row, :end] = 1
        yield {"input_ids": ids, "labels": labels, "position_ids": positions, "is_token": is_token}


def _separate_blocks(documents: Sequence[Document], length: int) -> Iterator[Block]:
    pieces: list[Document] = []
    tokens = 0
    for document in documents:
        # Each piece after the first repeats one token, so starts are length - 1 apart.
        for start in range(0, max(len(document) - 1, 1), length - 1):
            pieces.append(document.piece(start, start + length))
            tokens += len(pieces[-1])
            if tokens >= _BLOCK_TOKENS:
                yield _columns(pieces)
                pieces, tokens = [], 0
    if pieces:
        yield _columns(pieces)


def _columns(pieces: Sequence[Document]) -> Block:
    return {"input_ids": [piece.ids for piece in pieces], "labels": [piece.labels for piece in pieces]}


def _pack_stream(documents: Sequence[Document], length: int, pieces: _Pieces) -> None:
    """Fills sequences in order with what may be cut, wherever a sequence ends."""
    free = sequence = 0
    for number, document in enumerate(documents):
        start = 0
        while document.divisible and start < len(document) - 1:
            if free < SHORTEST_PIECE:
                free, sequence = length, pieces.new_sequence()
            stop = min(start + free, len(document))
            pieces.add(sequence, number, start, stop)
            free -= stop - start
            start = stop - 1


def _pack_whole(documents: Sequence[Document], length: int, pieces: _Pieces) -> None:
    """Best fit, in the order given: what may not be cut goes into the fullest sequence with room for it."""
    with_room: dict[int, list[int]] = {}  # free tokens -> a heap of sequences
    rooms: list[int] = []  # its keys, sorted
    for number, document in enumerate(documents):
        if document.divisible:
            continue
        at = bisect.bisect_left(rooms, len(document))
        if at < len(rooms):
            free = rooms[at]
            sequence = heapq.heappop(with_room[free])
            if not with_room[free]:
                del with_room[rooms.pop(at)]
        else:
            free, sequence = length, pieces.new_sequence()
        pieces.add(sequence, number, 0, len(document))
        free -= len(document)
        if free >= SHORTEST_PIECE:
            if free not in with_room:
                with_room[free] = []
                bisect.insort(rooms, free)
            heapq.heappush(with_room[free], sequence)
