"""Documents laid out in sequences: packed to a fixed length, or one each.

A document longer than a sequence is cut into segments. Each segment after the first begins with the last token of the
preceding segment, as context without a loss. So every token except a document's first is predicted exactly once, and
each segment has at least two tokens: one token of context and one token to predict.
"""

import bisect
from array import array
from collections.abc import Iterator, Sequence

import datasets
import numpy as np

from moetune.training.data.documents import Columns, Document, rows_on_disk
from moetune.training.step.loss import IGNORED

_SHORTEST = 2
"""Minimum number of tokens of a segment."""
_BLOCK_TOKENS = 2**20
"""Approximate number of tokens of the rows that are in memory at the same time."""


def packed(documents: Sequence[Document], length: int, pad_token_id: int) -> datasets.Dataset:
    """Pack documents into sequences of exactly `length` tokens; `pad_token_id` fills the rest of a sequence.

    Documents marked `divisible` fill sequences in order and are cut where a sequence ends; the others are placed whole,
    by best fit. `position_ids` restart at 0 with every document, which is how attention separates documents. Padding
    is like a further document, but without a loss.

    Returns:
        Rows with columns `input_ids`, `labels`, `position_ids` and `is_token` (0 for padding), each int32 [length].

    Raises:
        UserError: the temporary file of the rows cannot be written.
    """
    segments = array("q")
    sequences = _pack_stream(documents, length, segments)
    sequences = _pack_whole(documents, length, segments, sequences)
    blocks = _packed_blocks(documents, segments, sequences, length, pad_token_id)
    return rows_on_disk(("input_ids", "labels", "position_ids", "is_token"), blocks)


def separate(documents: Sequence[Document], length: int) -> datasets.Dataset:
    """Put every document in a sequence of its own, without padding; cut one of more than `length` tokens into several.

    Returns:
        Rows with columns `input_ids` and `labels`, each int32 [the sequence's length].

    Raises:
        UserError: the temporary file of the rows cannot be written.
    """
    return rows_on_disk(("input_ids", "labels"), _separate_blocks(documents, length))


def _packed_blocks(
    documents: Sequence[Document], segments: "array[int]", sequences: int, length: int, pad_token_id: int
) -> Iterator[Columns]:
    """Yield the rows of sequences; `segments` holds four numbers for each segment, which take 32 bytes: its sequence,
    its document, and where it starts and stops in it."""
    table = np.frombuffer(segments, np.int64).reshape(-1, 4)
    order = np.argsort(table[:, 0], kind="stable")
    ends = np.cumsum(np.bincount(table[:, 0], minlength=sequences))
    most = max(1, _BLOCK_TOKENS // length)
    for first in range(0, sequences, most):
        shape = (min(most, sequences - first), length)
        ids = np.full(shape, pad_token_id, dtype=np.int32)
        labels = np.full(shape, IGNORED, dtype=np.int32)
        positions = np.empty(shape, dtype=np.int32)
        is_token = np.zeros(shape, dtype=np.int32)
        for row in range(shape[0]):
            end = 0
            for _, document, low, high in table[order[ends[first + row - 1] if first + row else 0 : ends[first + row]]]:
                segment = documents[document].segment(low, high)
                start, end = end, end + len(segment)
                ids[row, start:end] = segment.ids
                labels[row, start:end] = segment.labels
                positions[row, start:end] = np.arange(len(segment))
            positions[row, end:] = np.arange(length - end)
            is_token[row, :end] = 1
        yield {"input_ids": ids, "labels": labels, "position_ids": positions, "is_token": is_token}


def _separate_blocks(documents: Sequence[Document], length: int) -> Iterator[Columns]:
    ids: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    tokens = 0
    for document in documents:
        # Each segment after the first repeats one token, so starts are length - 1 apart.
        for start in range(0, max(len(document) - 1, 1), length - 1):
            segment = document.segment(start, start + length)
            ids.append(segment.ids)
            labels.append(segment.labels)
            tokens += len(segment)
            if tokens >= _BLOCK_TOKENS:
                yield {"input_ids": ids, "labels": labels}
                ids, labels, tokens = [], [], 0
    if ids:
        yield {"input_ids": ids, "labels": labels}


def _pack_stream(documents: Sequence[Document], length: int, segments: "array[int]") -> int:
    """Fill sequences in order with the divisible documents, cutting a document wherever a sequence is full; add them to
    `segments`. Return the number of sequences."""
    free, sequences = 0, 0
    for number, document in enumerate(documents):
        start = 0
        while document.divisible and start < len(document) - 1:
            if free < _SHORTEST:
                free, sequences = length, sequences + 1
            stop = min(start + free, len(document))
            segments.extend((sequences - 1, number, start, stop))
            free -= stop - start
            start = stop - 1
    return sequences


def _pack_whole(documents: Sequence[Document], length: int, segments: "array[int]", sequences: int) -> int:
    """Put each indivisible document, in order, into the fullest sequence of its kind that has room for it (best fit),
    none is longer than a sequence; add them to `segments`. `sequences` are there already. Return their number."""
    rooms = array("q")  # free tokens · 2³² + sequence, sorted
    for number, document in enumerate(documents):
        if document.divisible:
            continue
        at = bisect.bisect_left(rooms, len(document) << 32)
        if at < len(rooms):
            free, sequence = divmod(rooms.pop(at), 2**32)
        else:
            free, sequence, sequences = length, sequences, sequences + 1
        segments.extend((sequence, number, 0, len(document)))
        if free - len(document) >= _SHORTEST:
            bisect.insort(rooms, (free - len(document) << 32) + sequence)
    return sequences
