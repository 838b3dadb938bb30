"""Where records come from: files, catalog and hub data sets, and what is said when they cannot be read."""

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moetune.errors import UserError
from moetune.training.data import sources
from moetune.training.data.files.source import Row
from moetune.training.data.sources import open_sources


def rows(spec):
    return [row for source in open_sources(str(spec)) for row in source.rows]


def message(spec):
    with pytest.raises(UserError) as caught:
        rows(spec)
    return str(caught.value)


@pytest.fixture
def catalog(tmp_path, monkeypatch):
    folder = tmp_path / "catalog" / "rivers"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("where it is from")
    (folder / "train.jsonl").write_text('{"text": "Rhine"}\n')
    (folder / "heldout.jsonl").write_text('{"text": "Elbe"}\n')
    monkeypatch.setattr(sources, "_catalog_root", lambda: tmp_path / "catalog")


def test_jsonl_numbers_its_lines_and_skips_blank_ones(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_bytes('\ufeff{"text": "a\u2028b"}\r\n\n  \n{"text": "c"}'.encode())
    assert rows(file) == [Row(1, {"text": "a\u2028b"}), Row(4, {"text": "c"})]


def test_broken_lines_keep_their_number_and_reason(tmp_path):
    file = tmp_path / "data.json"
    file.write_bytes(b'{"text": "a"}\n{"text": \n{"text": "\xff"}\n' + b"[" * 100_000 + b"\n7\n")
    found = rows(file)
    assert [row.number for row in found] == [1, 2, 3, 4, 5]
    assert found[1].problem == "not valid JSON: Expecting value (column 9)"
    assert found[2].problem == "not valid UTF-8"
    assert found[3].problem is not None
    assert found[3].problem.startswith("not valid JSON: ")
    assert found[4].value == 7


def test_a_json_array_holds_its_records(tmp_path):
    file = tmp_path / "data.json"
    file.write_text('\ufeff\n[\n  {"text": "a"},\n  7\n]\n')
    assert rows(file) == [Row(1, {"text": "a"}), Row(2, 7)]
    assert open_sources(str(file))[0].unit == "record"
    file.write_text('[\n{"text": "a"},\n{"text": }\n]')
    assert rows(file)[1:] == [Row(2, problem="not valid JSON: Expecting value (line 3, column 10)")]


def test_csv_rows_carry_the_names_of_the_first_line(tmp_path):
    file = tmp_path / "data.csv"
    file.write_bytes(b'\xef\xbb\xbfprompt,completion\n"a, ""b""\nc",d\ne,\n' + b"f,g,h\n")
    problem = "more fields than the first line names (2); quote those with commas"
    assert rows(file) == [
        Row(2, {"prompt": 'a, "b"\nc', "completion": "d"}),
        Row(4, {"prompt": "e", "completion": None}),
        Row(5, problem=problem),
    ]
    long = "x" * 200_000
    (tmp_path / "data.tsv").write_text(f"text\n{long}\n")
    assert rows(tmp_path / "data.tsv") == [Row(2, {"text": long})]
    file.write_bytes(b"text\nok\n\xff\n")
    assert rows(file)[-1].problem == "not valid UTF-8"


def test_a_text_file_is_one_record(tmp_path):
    file = tmp_path / "notes.md"
    file.write_bytes(b"\xef\xbb\xbf# Title\r\n\n\nbody\n")
    assert rows(file) == [Row(1, {"text": "# Title\r\n\n\nbody\n"})]
    file.write_bytes(b"one\ntwo\nthr\xe9e\n")
    assert rows(file) == [Row(3, problem="not valid UTF-8")]
    file.write_text(" \n\n")
    assert rows(file) == []


def test_parquet_with_damaged_pages(tmp_path):
    file = tmp_path / "data.parquet"
    pq.write_table(pa.table({"text": ["some text of a document"] * 9}), file, compression="none", use_dictionary=False)
    data = bytearray(file.read_bytes())
    at = data.find(b"some text") - 4
    data[at : at + 4] = b"\xff\xff\xff\x7f"  # the length of the first text; the footer is whole
    file.write_bytes(data)
    assert "is damaged after row 0" in message(file)
    file.write_bytes(b"not parquet")
    assert "is not a valid Parquet file" in message(file)


def test_catalog_splits(catalog):
    assert rows("rivers") == rows("rivers:train") == [Row(1, {"text": "Rhine"})]
    assert rows("rivers:heldout") == [Row(1, {"text": "Elbe"})]
    assert "has no split 'held-out'; it has heldout, train. Did you mean 'heldout'?" in message("rivers:held-out")
    assert "has no split '../rivers/train'" in message("rivers:../rivers/train")


@pytest.mark.parametrize("spec", ["dta.jsonl", "./dta.jsonl", "dta.jsonl:train"])
def test_a_missing_file_is_named_with_its_neighbour(tmp_path, monkeypatch, spec):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text("{}")
    assert message(spec) == f"no such file: {spec!r}. Did you mean 'data.jsonl'?"


@pytest.mark.parametrize("spec", ["/nowhere/x", "~nobody-here/x", "a/b/c", "..\\data", "org/data.csv", "./x"])
def test_what_looks_like_a_path_never_reaches_the_hub(monkeypatch, spec):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the hub"))
    assert message(spec).startswith(("no such file", f"{spec!r} cannot be a path"))


def test_a_bare_name_must_be_in_the_catalog(catalog):
    assert message("river") == (
        "'river' is neither a file nor a catalog data set (catalog: rivers); "
        "a hub data set is written organisation/name. Did you mean 'rivers'?"
    )


def test_foreign_suffixes_are_refused(tmp_path):
    (tmp_path / "data.xml").write_text("text\n")
    assert "files ending in '.xml' are not read; use .txt" in message(tmp_path / "data.xml")


def test_hub_data_sets_are_loaded_by_name_and_split(monkeypatch):
    asked = []

    def load_dataset(name, config, *, split):
        asked.append((name, config, split, datasets.are_progress_bars_disabled()))
        return datasets.Dataset.from_dict({"text": ["a", "b"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("moetune.training.data.sources.hub_is_reachable", lambda: True)
    bars = datasets.are_progress_bars_disabled()
    assert rows("org/data-v1.1") == rows("org/data-v1.1:test") == [Row(1, {"text": "a"}), Row(2, {"text": "b"})]
    assert rows("org/data:main:test") == rows("org/data:main:")
    name = "org/data-v1.1"
    assert asked == [
        (name, None, "train", True),
        (name, None, "test", True),
        ("org/data", "main", "test", True),
        ("org/data", "main", "train", True),
    ]
    assert datasets.are_progress_bars_disabled() == bars
    several = datasets.DatasetDict(dev=datasets.Dataset.from_dict({"text": ["d"]}))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split: several)
    assert [row.value for source in open_sources("org/data", held_out=True) for row in source.rows] == [{"text": "d"}]


def test_an_unreachable_hub_is_a_clear_error(monkeypatch, catalog):
    def load_dataset(name, config, *, split):
        raise ConnectionError("Couldn't reach the Hub\nlong trace")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("moetune.training.data.sources.hub_is_reachable", lambda: True)
    assert message("me/river") == (
        "hub data set 'me/river' cannot be loaded: Couldn't reach the Hub. Did you mean 'rivers'? "
        "Offline, use a local file or one of the catalog: rivers."
    )
