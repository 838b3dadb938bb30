"""Which files of a folder are read: the records of each split are those that `datasets` gives."""

import bz2
import gzip
import lzma

import datasets
import pandas as pd
import pyarrow as pa
import pytest

from tests.training.data.files.read import message, notes, records

PACKED = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def write(folder, name):
    """Write a file whose two records tell its name."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame({"text": [f"{name} {number}" for number in range(2)]})
    plain = name.removesuffix(file.suffix) if file.suffix in PACKED else name
    if plain.endswith(".parquet"):
        return frame.to_parquet(file)
    if plain.endswith(".arrow"):
        return frame.to_feather(file, compression="uncompressed")
    if plain.endswith((".csv", ".tsv")):
        raw = frame.to_csv(index=False, sep="\t" if plain.endswith(".tsv") else ",").encode()
    else:
        raw = frame.to_json(orient="records", lines=not plain.endswith(".json")).encode()
    return file.write_bytes(PACKED.get(file.suffix, bytes)(raw))


def card(*lines):
    return "\n".join(["---", "configs:", *lines, "---", "# About"])


FOLDERS = {
    "hub": [f"data/{name}.parquet" for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")],
    "hub, other names": ["data/train-00000-of-00001-a1b2.csv", "data/random.two-00000-of-00001.csv"],
    "names": ["train.jsonl", "test.jsonl", "valid.jsonl"],
    "words in names": ["my-train-file.jsonl", "my_test_file.jsonl", "other.jsonl", "testament.jsonl"],
    "numbers": ["train_0.csv", "train_1.csv", "dev_0.csv"],
    "folders": ["train/a.jsonl", "train/b.jsonl", "test/a.jsonl"],
    "folders below": ["data/training/x.json", "data/evaluation/x.json"],
    "names of nothing": ["a.jsonl", "trainer.jsonl"],
    "one": ["data.ndjson"],
    "only a test": ["data-test.jsonl"],
    "gz": ["train.jsonl.gz", "dev.jsonl.gz"],
    "xz": ["train.csv.xz", "eval.csv.xz"],
    "bz2": ["a.json.bz2", "b.json.bz2"],
    "tsv": ["a.tsv", "b.tsv"],
    "arrow": ["a.arrow", "b.arrow"],
    "hidden": ["z.jsonl", ".ipynb_checkpoints/z-checkpoint.jsonl", ".z.jsonl", "__pycache__/z.jsonl"],
    "below": ["b.jsonl", "sub/deep/a.jsonl"],
    "card: files": ["one.jsonl", "two.jsonl", ["- config_name: default", "  data_files: two.jsonl"]],
    "card: splits": [
        "x/a.jsonl", "x/b.jsonl", "y.jsonl",
        ["- config_name: a", "  data_files:", "  - {split: train, path: ['y.jsonl', 'x/a*']}",
         "  - {split: more, path: x/b.jsonl}"],
    ],
    "card: folder": [
        "en/train.jsonl", "de/train.jsonl", "de/test.jsonl",
        ["- {config_name: en, data_dir: en}", "- {config_name: de, data_dir: de, default: true}"],
    ],
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", FOLDERS)
def test_every_split_has_the_records_that_datasets_gives(tmp_path, kind):
    folder = tmp_path / "set"
    files = FOLDERS[kind]
    for name in files:
        if isinstance(name, list):
            (folder / "README.md").write_text(card(*name))
        else:
            write(folder, name)
    expected = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    for split, rows in expected.items():
        assert records(f"{folder}:{split}") == rows.to_list(), split
    if "train" in expected:
        assert records(folder) == expected["train"].to_list()


def test_what_is_passed_over_is_listed(tmp_path):
    for name in (
        "data/train-00000-of-00002.csv",
        "data/test-00000-of-00001.csv",
        "stray.csv",
        ".ipynb_checkpoints/a.csv",
    ):
        write(tmp_path, name)
    (tmp_path / "README.md").write_text("# About")
    (tmp_path / "labels.xml").write_text("<a/>")
    (tmp_path / ".gitattributes").write_text("")
    assert notes(tmp_path) == [
        f"{str(tmp_path)!r}: the split 'train' is read; passed over: .ipynb_checkpoints/a.csv, README.md, "
        "data/test-00000-of-00001.csv (split test), labels.xml, stray.csv",
        f"{str(tmp_path)!r}: the split 'train' is not whole; missing: data/train-00001-of-00002",
    ]


def test_a_subfolder_for_evaluation_does_not_hide_the_training_data(tmp_path):
    write(tmp_path, "data.jsonl")
    write(tmp_path, "eval/data.jsonl")
    assert [record["text"] for record in records(tmp_path)] == ["data.jsonl 0", "data.jsonl 1"]
    assert "eval/data.jsonl (split test)" in notes(tmp_path)[0]
    write(tmp_path, "valid.jsonl")
    assert len(records(tmp_path)) == len(records(tmp_path, held_out=True)) == 2
    assert records(tmp_path, held_out=True)[0] == {"text": "valid.jsonl 0"}


def test_partitions_by_split_are_splits(tmp_path):
    """`datasets` joins what pandas and Spark write by `partition_cols=["split"]`, so that the test records train."""
    pd.DataFrame({"text": ["a", "b"], "split": ["train", "test"]}).to_parquet(tmp_path, partition_cols=["split"])
    assert (records(tmp_path), records(tmp_path, held_out=True)) == ([{"text": "a"}], [{"text": "b"}])


def test_a_split_that_is_not_there_is_named_with_those_that_are(tmp_path):
    for name in ("test.jsonl", "dev.jsonl"):
        write(tmp_path, name)
    said = message(tmp_path)
    assert "has no split 'train'; it has validation, test" in said
    assert f"{tmp_path}:SPLIT" in said
    assert "data.split" in said
    assert "has no split 'tset'; it has validation, test. Did you mean 'test'?" in message(f"{tmp_path}:tset")


def test_records_of_all_types_are_read_and_texts_if_there_are_no_records(tmp_path):
    write(tmp_path, "a.jsonl")
    write(tmp_path, "b.csv")
    (tmp_path / "LICENSE.txt").write_text("free")
    (tmp_path / "requirements.txt").write_text("torch")
    assert [record["text"] for record in records(tmp_path)] == ["a.jsonl 0", "a.jsonl 1", "b.csv 0", "b.csv 1"]
    texts = tmp_path / "texts"
    texts.mkdir()
    assert "holds no file that can be read: .txt" in message(texts)
    for name in ("train/b.md", "train/a.txt.gz", "test/c.txt"):
        (texts / name).parent.mkdir(parents=True, exist_ok=True)
        (texts / name).write_bytes(gzip.compress(b"a") if name.endswith("gz") else name.encode())
    assert records(texts) == [{"text": "a"}, {"text": "train/b.md"}]


def test_a_card_that_cannot_be_followed_is_named(tmp_path):
    write(tmp_path, "a.csv")
    readme = tmp_path / "README.md"
    readme.write_text(card("- {config_name: a, data_files: gone.csv}"))
    assert "split 'train' is gone.csv, and no such file is there" in message(tmp_path)
    readme.write_text(card("- {config_name: a, data_files: ../*.csv}"))
    assert "split 'train' is ../*.csv, and no such file is there" in message(tmp_path)
    readme.write_text(card("- {config_name: a, data_files: a.csv, sep: ';'}"))
    assert "says to read its files with sep: ';', which is not done here" in message(tmp_path)
    readme.write_text(card("- {config_name: a, data_files: a.csv}", "- {config_name: b, data_files: a.csv}"))
    assert "has several configurations (README.md declares a, b); write" in message(tmp_path)
    assert records(f"{tmp_path}:b:train") == records(tmp_path / "a.csv")
    assert "has no configuration 'c'" in message(f"{tmp_path}:c:train")
    readme.write_text(card("- config_name"))
    assert "the card of" in message(tmp_path)
    assert "correct or remove it" in message(tmp_path)


def test_links_are_read_or_named(tmp_path):
    write(tmp_path, "away/a.jsonl")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "b.jsonl").symlink_to(tmp_path / "away" / "a.jsonl")
    assert records(tmp_path / "set") == records(tmp_path / "away")
    (tmp_path / "away" / "a.jsonl").unlink()
    assert "'{}' cannot be read: No such file".format(tmp_path / "set" / "b.jsonl") in message(tmp_path / "set")


@pytest.mark.parametrize("several", [False, True])
def test_what_save_to_disk_wrote(tmp_path, several):
    folder = tmp_path / "saved"
    rows = {"train": ["a", "b", "c"], "test": ["d"], "validation": ["e"]}
    splits = {split: datasets.Dataset.from_dict({"text": texts}) for split, texts in rows.items()}
    if not several:
        splits["train"].select([2, 0]).save_to_disk(folder, num_shards=2)
        assert records(folder) == records(f"{folder}:train") == [{"text": "c"}, {"text": "a"}]
        assert notes(folder) == []
        assert "has no split 'test'; it has train" in message(f"{folder}:test")
        return
    datasets.DatasetDict(splits).save_to_disk(folder)
    assert [record["text"] for record in records(folder)] == rows["train"]
    assert records(f"{folder}:test") == [{"text": "d"}]
    assert records(folder, held_out=True) == [{"text": "e"}]
    assert notes(folder) == [f"{str(folder)!r}: the split 'train' is read; passed over: test, validation"]
    (folder / "dataset_dict.json").write_text('{"splits": ["test", "validation"]}')
    assert "has no split 'train'; it has test, validation" in message(folder)
    (folder / "dataset_dict.json").write_text("{}")
    assert "dataset_dict.json" in message(folder)


def test_a_damaged_saved_data_set_is_named(tmp_path):
    datasets.Dataset.from_dict({"text": ["some text"] * 50}).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert str(tmp_path / "saved") in message(tmp_path / "saved")
    at = whole.index(b"some text")
    file.write_bytes(whole[:at] + b"\xff" * 9 + whole[at + 9 :])  # not UTF-8
    assert "damaged" in message(tmp_path / "saved")


def test_arrow_files_with_damaged_offsets_are_not_followed(tmp_path):
    table = pa.table({"text": ["abcdefgh"] * 4})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    assert len(records(tmp_path / "a.arrow")) == 4
    raw = (tmp_path / "a.arrow").read_bytes()
    offsets = pa.array([0, 8, 16, 24, 32], pa.int32()).buffers()[1].to_pybytes()[:20]
    assert raw.count(offsets) == 1
    (tmp_path / "a.arrow").write_bytes(raw.replace(offsets, offsets[:-4] + b"\0\0\0\x7f"))
    assert "damaged after row 0" in message(tmp_path / "a.arrow")
