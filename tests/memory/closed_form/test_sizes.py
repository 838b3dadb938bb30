"""Sizes that can be told apart in numbers of bytes."""

import numpy as np
import pytest

from moetune.memory.closed_form.probe import probe_chunks, probe_rows
from moetune.memory.closed_form.sizes import (
    CHUNK_NAMES,
    PLACES,
    Monomials,
    NotedChunks,
    alignment,
    lengths,
    places,
    sizes_of_chunks,
    value_of,
)
from moetune.training.step.loss import Chunks


@pytest.mark.parametrize("alone", [False, True])
def test_probe_chunks_have_every_place(alone: bool) -> None:
    chunks = probe_chunks(53 * 64 * 59, alone=alone)
    assert sum(len(range(chunks.tokens)[part]) for part in chunks.slices()) == chunks.tokens
    there = {PLACES[number] for number in np.flatnonzero(places(chunks))}
    assert there == ({place for place in PLACES if place[0] in ("", "first")} if alone else set(PLACES))


@pytest.mark.parametrize(
    ("chunks", "there"),
    [
        (None, []),
        (Chunks(100, 100, 100), ["first", "first rest"]),
        (Chunks(100, 100, 60), ["first", "first full", "first rest"]),
        (Chunks(100, 60, 50), ["first", "first full", "first rest", "last", "last rest"]),
        (Chunks(100, 45, 45), ["first", "first rest", "middle", "middle rest", "last", "last rest"]),
    ],
)
def test_places(chunks: Chunks | None, there: list[str]) -> None:
    assert [" ".join(PLACES[n]).strip() for n in np.flatnonzero(places(chunks))] == ["", *there]
    if chunks is not None:
        noted = NotedChunks(chunks.tokens, chunks.size, chunks.block, lambda: 0)
        for rows in noted.slices():
            list(noted.blocks(len(range(chunks.tokens)[rows])))
        assert sorted({" ".join(place).strip() for _, place in noted.noted}) == sorted(["", *there])


def test_sizes_of_chunks() -> None:
    sizes = sizes_of_chunks(Chunks(1000, 300, 128), CHUNK_NAMES)
    assert sizes == {"c": 300, "c′": 100, "b": 128, "b′": 44, "b″": 100}


def test_rows_sum_up_and_idle_experts_have_none() -> None:
    rows = probe_rows(100_000, 8, (2, 5))
    assert sum(rows) == 100_000
    assert rows[2] == rows[5] == 0
    assert all(rows[expert] for expert in (0, 1, 3, 4, 6, 7))


def test_a_product_is_found() -> None:
    sizes = {"B": 53, **lengths(64 * 59)}
    names = Monomials(sizes)
    for coefficient, powers in ((2, (("B", 1), ("S", 2))), (4096, (("B", 1), ("S", 1))), (12, ()), (8, (("S-1", 1),))):
        nbytes = coefficient * value_of(powers, sizes)
        assert names.of(nbytes) == (coefficient, False, powers)
    assert names.of(14 * 997, rows=997) == (14, True, ())


def test_alignment() -> None:
    assert [alignment(length) for length in (2048, 24, 7, 96)] == [64, 8, 1, 32]
