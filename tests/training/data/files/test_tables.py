"""Records of Arrow tables are those that were written, whatever wrote the file: nulls, `Json()` columns, dates."""

import decimal

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moetune.training.data.files import tables
from moetune.training.data.sources import open_sources
from tests.training.data.files.read import message, records, write_lines


def tool(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def call(name, arguments, tool):
    asked = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }
    return {"messages": [{"role": "user", "content": "go"}, asked], "tools": [tool]}


UNLIKE = [
    call(
        "add", {"a": 1, "more": [{"b": 2}, {"deep": [[{"c": "x"}], [{"d": [1]}]]}]}, tool("add", a={"type": "number"})
    ),
    call(
        "say",
        {"text": "hi/é\n", "list": ["u", "v"]},
        tool("say", text={"type": "string", "enum": ["hi", "42", "null"]}),
    ),
    {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "done"}], "tools": []},
]


def through_pyarrow(folder, values):
    pq.write_table(pa.Table.from_pylist(values), folder / "a.parquet")
    return folder / "a.parquet"


def through_arrow_file(folder, values):
    table = pa.Table.from_pylist(values)
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return folder / "a.arrow"


def saved(folder, values):
    datasets.Dataset.from_list(values).save_to_disk(folder / "saved")
    return folder / "saved"


def of_json(folder, values):
    """What `datasets` makes of JSON lines: lists of unlike objects become `Json()` columns."""
    file = write_lines(folder / "a.jsonl", *values)
    return datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder / "cache"))


def parquet_of_json(folder, values):
    of_json(folder, values).to_parquet(folder / "b.parquet")
    return folder / "b.parquet"


def saved_json(folder, values):
    of_json(folder, values).save_to_disk(folder / "saved")
    return folder / "saved"


WAYS = [through_pyarrow, through_arrow_file, saved, parquet_of_json, saved_json]


@pytest.mark.parametrize("way", WAYS)
def test_records_are_those_that_were_written(tmp_path, way):
    assert records(way(tmp_path, UNLIKE)) == UNLIKE


def test_null_items_of_lists_are_kept_and_columns_too(tmp_path):
    values = [{"a": [1, None], "b": None}, {"a": None, "b": {"c": [None, {"d": None}], "e": "f"}}]
    pq.write_table(pa.Table.from_pylist(values), tmp_path / "a.parquet")
    assert records(tmp_path / "a.parquet") == [values[0], {"a": None, "b": {"c": [None, {}], "e": "f"}}]


MIXED = [
    "hello\nyou",
    'say "hi" é',
    "a/b",
    '{"temp": 3}',
    '[1, "2"]',
    "null",
    "[not json",
    [{"type": "text", "text": "x/y"}],
]


@pytest.mark.parametrize("nested", [False, True])
def test_strings_of_a_json_column_are_those_that_were_written(tmp_path, nested):
    def value(content):
        return {"deep": [{"messages": [{"role": "user", "content": content}]}]} if nested else {"content": content}

    values = [value(content) for content in MIXED]
    rows = of_json(tmp_path, values)
    assert "Json" in str(rows.features)
    rows.to_parquet(tmp_path / "b.parquet")
    assert records(tmp_path / "b.parquet") == values


def test_json_columns_of_later_chunks(tmp_path):
    file = write_lines(
        tmp_path / "a.jsonl", {"content": "a"}, {"content": ["b"]}, *({"content": f"é\n{n}"} for n in range(90))
    )
    rows = datasets.load_dataset(
        "json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"), chunksize=100
    )
    rows.save_to_disk(tmp_path / "saved")
    assert records(tmp_path / "saved") == records(file)


def test_json_columns_of_other_programs_are_decoded(tmp_path):
    texts = ['{"a": [1, 2]}', '"b/c"', "3", None, "no json"]
    pq.write_table(pa.table({"x": pa.array(texts, pa.json_())}), tmp_path / "a.parquet")
    assert [record["x"] for record in records(tmp_path / "a.parquet")] == [{"a": [1, 2]}, "b/c", 3, None, "no json"]


LARGEST = 2**62


def test_every_type_is_read(tmp_path):
    moments = pa.array([0, LARGEST, None], pa.timestamp("us"))
    structs = pa.StructArray.from_arrays([moments, pa.array(["a", "b", None])], ["at", "content"])
    columns = {
        "struct": structs,
        "list": pa.ListArray.from_arrays([0, 1, 2, 3], structs),
        "large list": pa.LargeListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int64()), structs),
        "fixed list": pa.FixedSizeListArray.from_arrays(moments, 1),
        "map": pa.MapArray.from_arrays([0, 1, 2, 3], pa.array(["k", "k", "k"]), structs),
        "dictionary": pa.DictionaryArray.from_arrays([0, 1, 0], moments[:2]),
        "words": pa.DictionaryArray.from_arrays([0, 1, None], ["a", "b"]),
        "date": pa.array([0, 2**31 - 1, None], pa.int32()).cast(pa.date32()),
        "time": pa.array([3600, 1, None], pa.time32("s")),
        "duration": pa.array([LARGEST, 1, None], pa.duration("s")),
        "large": pa.array(["a", "b", None], pa.large_string()),
        "zone": pa.array([0, LARGEST, None], pa.timestamp("ns", "+02:00")),
        "number": pa.array([decimal.Decimal("1.50"), None, None]),
    }
    table = pa.table(columns)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    pq.write_table(table, tmp_path / "a.parquet")
    of_arrow, of_parquet = records(tmp_path / "a.arrow"), records(tmp_path / "a.parquet")
    begin, late = {"at": "1970-01-01 00:00:00.000000", "content": "a"}, {"at": LARGEST, "content": "b"}
    for key, (first, second) in {
        "struct": (begin, late), "list": ([begin], [late]), "large list": ([begin], [late]),
        "fixed list": ([begin["at"]], [LARGEST]), "map": ({"k": begin}, {"k": late}),
        "dictionary": (begin["at"], LARGEST), "words": ("a", "b"), "date": ("1970-01-01", 2**31 - 1),
        "large": ("a", "b"),
    }.items():  # fmt: skip
        for found in (of_arrow, of_parquet):
            assert (found[0][key], found[1][key]) == (first, second), key
    assert [of_arrow[0]["time"], of_parquet[0]["time"]] == ["01:00:00", "01:00:00.000"]
    assert of_arrow[1]["duration"] == 1
    assert of_arrow[2] == {
        **dict.fromkeys(columns), "struct": {}, "list": [{}], "large list": [{}], "fixed list": [None],
        "map": {"k": {}}, "dictionary": begin["at"],
    }  # fmt: skip


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_two_columns_of_one_name_are_refused(tmp_path, ending):
    pair = [pa.array(["a"]), pa.array(["b"])]
    inner = pa.StructArray.from_arrays(pair, ["content", "content"])
    tables = [
        pa.Table.from_arrays(pair, names=["text", "text"]),
        pa.table({"messages": pa.ListArray.from_arrays([0, 1], inner)}),
    ]
    for table, name in zip(tables, ("text", "content"), strict=True):
        file = tmp_path / f"{name}.{ending}"
        if ending == "parquet":
            pq.write_table(table, file)
        else:
            with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
        assert f"more than one column {name!r}; rename or remove all but one" in message(file)


def test_a_key_twice_in_a_map_and_text_that_is_none(tmp_path):
    twice = pa.MapArray.from_arrays([0, 2], pa.array(["k", "k"]), pa.array([1, 2]))
    pq.write_table(pa.table({"a": twice}), tmp_path / "a.parquet")
    offsets = pa.array([0, 1], pa.int32()).buffers()[1]
    broken = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"\xff")])
    pq.write_table(pa.table({"a": broken}), tmp_path / "b.parquet")
    files = [str(tmp_path / name) for name in ("a.parquet", "b.parquet")]
    problems = [row.problem for file in files for source in open_sources(file) for row in source.rows]
    assert problems == ["a map holds the key 'k' twice", "not valid UTF-8"]


def test_rows_that_unpack_to_much_are_held_one_by_one(tmp_path, monkeypatch):
    pq.write_table(pa.table({"text": ["x" * 99] * 3}), tmp_path / "a.parquet")
    for most, sizes in ((2**27, [3]), (200, [1, 1, 1])):
        monkeypatch.setattr(tables, "_BYTES", most)
        assert [len(batch) for batch in tables.parquet_batches(pq.ParquetFile(tmp_path / "a.parquet"))] == sizes
