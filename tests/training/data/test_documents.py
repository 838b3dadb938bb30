"""Tokens on disk: what memory a set takes, and what is left behind."""

import json
import os
import resource
import tracemalloc

import pyarrow as pa
import pytest

from moetune.errors import UserError
from moetune.training.data import packing
from tests.training.data.test_load import load, make_tokenizer, write

RECORD = {"prompt": "a" * 150, "completion": "b" * 150}


@pytest.mark.full
@pytest.mark.parametrize("packs", [True, False])
def test_memory_grows_by_a_hundredth_of_a_set(tmp_path, monkeypatch, packs):
    monkeypatch.setattr(packing, "_BLOCK_TOKENS", 2**14)
    tokenizer = make_tokenizer()
    load(write(tmp_path / "warm.jsonl", RECORD), tokenizer, 512)
    peaks, records = [], (1000, 4000)  # fewer fit in buffers of a fixed size
    for count in records:
        file = tmp_path / f"{count}.jsonl"
        texts = [json.dumps(RECORD)] * count
        file.write_text("\n".join(texts))
        del texts
        tracemalloc.start()
        data = load(file, tokenizer, 512, packing=packs, validation=0.5)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(data.counts.lengths) == count // 2
        assert pa.total_allocated_bytes() < 2**20
    grown = (peaks[1] - peaks[0]) / (records[1] - records[0])
    assert grown < 100, f"{grown:.0f} bytes a record"  # its tokens and text are 30 times that much


def test_nothing_is_left_behind_not_even_while_it_is_used(tmp_path, monkeypatch):
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    data = load(write(tmp_path / "data.jsonl", RECORD), make_tokenizer(), 512)
    assert not os.listdir(folder)
    assert sum(data.train[0]["is_token"]) == 302


def test_a_disk_without_room_is_one_error(tmp_path, monkeypatch):
    file = write(tmp_path / "data.jsonl", *[RECORD] * 20)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    with pytest.raises(UserError, match=r"temporary files in '.*gone'.*: No such file.*; set TMPDIR to a folder with"):
        load(file, make_tokenizer(), 512)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for room in (40_000, 100_000):  # too little for documents, and for rows of them
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
            with pytest.raises(UserError, match=r"File too large; set TMPDIR to a folder with room, 24 bytes a token"):
                load(file, make_tokenizer(), 512)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
