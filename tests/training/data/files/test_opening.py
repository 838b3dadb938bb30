"""Compressed files, under whatever name, and pointers of Git LFS."""

import bz2
import gzip
import lzma
import re

import datasets
import pyarrow as pa
import pytest

from tests.training.data.files.read import message, records, write_lines

RAW = b'{"text": "a"}\n{"text": "b"}\n'
HALVES = RAW[:14], RAW[14:]


def by_arrow(codec):
    def compressed(raw):
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, codec) as stream:
            stream.write(raw)
        return sink.getvalue().to_pybytes()

    return compressed


PACKED = {
    "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": by_arrow("zstd"), "lz4": by_arrow("lz4"),
}  # fmt: skip


@pytest.mark.parametrize("ending", PACKED)
@pytest.mark.parametrize("name", ["data.jsonl.{}", "DATA.JSONL.{}", "data.jsonl"])
def test_compressed_files_are_read(tmp_path, ending, name):
    file = tmp_path / name.format(ending)
    file.write_bytes(PACKED[ending](RAW))
    assert records(file) == [{"text": "a"}, {"text": "b"}]
    skipped = b"\x50\x2a\x4d\x18\1\0\0\0x" if ending == "zst" else b""  # a frame of pzstd's
    file.write_bytes(skipped + b"".join(map(PACKED[ending], HALVES)))  # as parallel compressors write it
    assert records(file) == [{"text": "a"}, {"text": "b"}]
    if name == "data.jsonl.{}":
        file.write_bytes(PACKED[ending](RAW * 9)[:-9])
        assert re.search("cannot be read: |is damaged after line", message(file))
        file.write_bytes(RAW)  # unpacked without being renamed
        assert records(file) == [{"text": "a"}, {"text": "b"}]


def test_every_text_format_may_be_compressed(tmp_path):
    for name, raw in {"a.csv.gz": b"text\na\n", "a.txt.gz": b"a", "a.json.gz": b'[{"text": "a"}]'}.items():
        (tmp_path / name).write_bytes(gzip.compress(raw))
        assert records(tmp_path / name) == [{"text": "a"}]
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    assert ".parquet files are not read from within .gz; unpack it first" in message(tmp_path / "a.parquet.gz")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234567\n"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.md", "a.parquet", "a.arrow", "a.jsonl.gz"])
def test_a_pointer_of_git_lfs_is_not_data(tmp_path, name):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text(POINTER)
    for spec in (tmp_path / "data" / name, tmp_path / "data"):
        said = message(spec)
        assert str(tmp_path / "data" / name) in said
        assert "git lfs pull" in said


def test_a_pointer_in_a_saved_data_set(tmp_path):
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    file.write_text(POINTER)
    assert "git lfs pull" in message(tmp_path / "saved")


def test_a_file_is_its_only_split(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", {"text": "a"})
    assert records(f"{file}:train") == records(file, held_out=True) == [{"text": "a"}]
    assert "has no split 'test'; it has train" in message(f"{file}:test")
    assert "a file has no configurations" in message(f"{file}:en:test")
