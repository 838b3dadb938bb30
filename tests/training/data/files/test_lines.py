"""JSON objects that hold lists of records, and columns of one name in CSV."""

import json

import pytest

from moetune.training.data.files import lines
from moetune.training.data.sources import open_sources
from tests.training.data.files.read import message, notes, read, records, write_lines

ROWS = [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize("indent", [None, 2])
def test_the_lists_of_an_object_are_splits(tmp_path, indent):
    file = tmp_path / "data.json"
    file.write_text(json.dumps({"version": 1, "train": ROWS, "val": ROWS[:1], "other": ROWS[1:]}, indent=indent))
    assert read(file) == (ROWS, [f"{str(file)!r}: the list 'train' is read; passed over: 'version', 'val', 'other'"])
    assert records(f"{file}:other") == ROWS[1:]
    assert records(file, held_out=True) == ROWS[:1]
    assert "has no split 'test'; it has train, val, other" in message(f"{file}:test")
    file.write_text(json.dumps({"version": "0.1", "data": ROWS}, indent=indent))
    assert records(file) == ROWS
    assert notes(file) == [f"{str(file)!r}: the list 'data' is read; passed over: 'version'"]
    file.write_text(json.dumps({"validation": ROWS}, indent=indent))
    assert "has no split 'train'; it has validation" in message(file)


@pytest.mark.parametrize(
    "text",
    [
        '{"messages": [{"role": "user"}]}',
        '{"text": "a", "spans": [{"at": 1}]}\n',
        '{"train": [{"text": "a"}]}\n{"train": []}',
        '{"train": ["a"]}',
        "{}",
    ],
)
def test_an_object_that_is_a_record_stays_one(tmp_path, text):
    file = tmp_path / "data.json"
    file.write_text(text)
    assert records(file) == [json.loads(line) for line in text.splitlines()]


def test_a_line_is_a_record_unless_its_lists_are_named_like_splits(tmp_path):
    line = {"talk": [{"role": "user"}]}
    assert records(write_lines(tmp_path / "a.jsonl", line)) == [line]
    assert records(f"{tmp_path / 'a.jsonl'}:talk") == line["talk"]
    assert records(write_lines(tmp_path / "b.jsonl", {"train": ROWS})) == ROWS
    assert records(write_lines(tmp_path / "c.json", line)) == line["talk"]


def test_what_is_wrong_in_a_list_of_an_object_is_placed(tmp_path):
    file = tmp_path / "data.json"
    file.write_text('{"train": [\n{"text": "a"},\n{"text": "b", "text": "c"}]}')
    (source,) = open_sources(str(file))
    assert [row.problem and row.problem[:14] for row in source.rows] == ["the key 'text'"]
    file.write_text('{"train": [\n{"text": "a"},\n{"text": }]}')
    (source,) = open_sources(str(file))
    assert source.unit == "record"
    assert [row.problem for row in source.rows] == ["not valid JSON: Expecting value (line 3, column 10)"]


def test_two_columns_of_one_name_are_refused(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("text,id,text\na,1,b\n")
    assert "more than one column 'text'; rename or remove all but one" in message(file)
    file.write_text(",text,\n1,a,2\n")  # columns without a name are no keys
    assert [record["text"] for record in records(file)] == ["a"]


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_a_record_over_several_lines_is_told_once(tmp_path, name):
    (tmp_path / name).write_text("\n".join(json.dumps({"messages": [ROWS[0]]}, indent=1) for _ in range(3)))
    (source,) = open_sources(str(tmp_path / name))
    (row,) = source.rows
    assert "write each on a line of its own, as `jq -c .` does" in row.problem
    (tmp_path / name).write_text('{"text":')
    assert [row.problem for row in open_sources(str(tmp_path / name))[0].rows] == [
        "not valid JSON: Expecting value (column 9)"
    ]


def test_csv_with_semicolons_and_text_in_utf_16(tmp_path):
    file = tmp_path / "data.csv"
    file.write_text('\ufeffprompt;completion\n"a;b";c,d\n')
    assert records(file) == [{"prompt": "a;b", "completion": "c,d"}]
    file.write_text("text,more;less\na;b,c\n")
    assert records(file) == [{"text": "a;b", "more;less": "c"}]
    file.write_bytes("text\na\n".encode("utf-16"))
    assert "iconv -f UTF-16 -t UTF-8" in message(file)


@pytest.mark.parametrize(
    "text", ["[", "[1", '[\n1, {"a": "b', "[1 2]", '[{"a": 1},\n\n {"a" 1}, 3]', "[1]\n2", "[1, tru]", "[,1]", "[1.e5]"]
)
def test_what_is_wrong_in_an_array_is_said_as_python_says_it(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(json.JSONDecodeError) as expected:
        json.loads(text)
    *_, last = open_sources(str(tmp_path / "a.json"))[0].rows
    line = f"line {expected.value.lineno}, " if expected.value.lineno > 1 else ""
    assert last.problem == f"not valid JSON: {expected.value.msg} ({line}column {expected.value.colno})"


def test_an_array_that_does_not_fit_in_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "_MOST_BYTES", 20)
    file = tmp_path / "a.json"
    file.write_text("[" + '{"text": "a"},' * 5 + "7]")
    assert "one JSON value of more than 20 bytes; write each record on a line of its own" in message(file)
    write_lines(file, *[{"text": "a"}] * 5)
    assert len(records(file)) == 5
