"""Records of Arrow tables: Parquet and Arrow files, and what `datasets` keeps.

Arrow gives all structs of a column the same keys, so a record that lacks a key has null there: null values of structs
are left out at every depth. Null items of lists and null values of maps are kept: they were written.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from moetune.training.data.files.lines import refuse_twice
from moetune.training.data.files.source import Row

_ROWS, _BYTES = 32, 2**27
"""Most rows, and about as many bytes, that are unpacked at the same time."""
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_MOMENTS = (pa.TimestampScalar, pa.Date32Scalar, pa.Date64Scalar, pa.Time32Scalar, pa.Time64Scalar)


def parquet_batches(file: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a Parquet file, some at a time, and close it.

    No value of a row group is larger than the group unpacked, but a small group may repeat it in each of its rows. So
    large groups are read row by row.
    """
    with file:
        for group in range(file.num_row_groups):
            size = max(1, file.metadata.row_group(group).total_byte_size)
            yield from file.iter_batches(batch_size=max(1, min(_ROWS, _BYTES // size)), row_groups=[group])


def arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an Arrow file, in the stream format, which `datasets` writes, or the file format."""
    with pa.memory_map(str(path)) as file:
        try:
            batches: Iterable[pa.RecordBatch] = pa.ipc.open_stream(file)
        except pa.ArrowInvalid:
            reader = pa.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        for batch in batches:
            batch.validate(full=True)  # damaged offsets would be followed anywhere in memory
            yield batch


def dataset_batches(rows: datasets.Dataset) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a data set of `datasets`, some at a time, as Arrow holds them."""
    for table in rows.with_format("arrow").iter(_ROWS):
        table.validate(full=True)
        yield from table.to_batches()


def table_rows(name: str, batches: Iterable[pa.RecordBatch]) -> Iterator[Row]:
    """Yield the records of a table: all of its columns, but no keys of structs whose value is null.

    Dates and times become text, `2027-01-31 09:30:00`, or a number where they are out of range; durations are numbers.
    Values of `Json()` columns are decoded.

    Raises:
        UserError: two columns of the table `name`, or keys of a struct in it, have the same name.
    """
    number, schema = 0, None
    for batch in batches:
        if schema is None:
            schema = batch.schema
            decode = _as_datasets_wrote if b"huggingface" in (schema.metadata or {}) else json.loads
            _refuse_twice(name, pa.struct(list(schema)))
        columns = [*zip(schema.names, batch.columns, strict=True)]
        for at in range(len(batch)):
            number += 1
            try:
                yield Row(number, {key: _value(column[at], decode) for key, column in columns})
            except (UnicodeDecodeError, KeyError) as error:
                twice = f"a map holds the key {error} twice" if isinstance(error, KeyError) else "not valid UTF-8"
                yield Row(number, problem=twice)


def _refuse_twice(name: str, type_: pa.DataType) -> None:
    fields = [type_.field(index) for index in range(type_.num_fields)]
    if pa.types.is_struct(type_):
        refuse_twice(name, [field.name for field in fields])
    for field in fields:
        _refuse_twice(name, field.type)


def _value(scalar: pa.Scalar, decode: Callable[[str], Any]) -> Any:
    """Return an Arrow value as Python holds JSON; `decode` gives the value of a text in a column of JSON."""
    if not scalar.is_valid:
        return None
    if isinstance(scalar, (pa.StringScalar, pa.LargeStringScalar)):
        return scalar.as_py()
    if isinstance(scalar, pa.StructScalar):
        return {key: value for key, item in scalar.items() if (value := _value(item, decode)) is not None}
    if isinstance(scalar, pa.MapScalar):
        keys = [str(_value(pair[0], decode)) for pair in scalar.values]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise KeyError(twice[0])
        return dict(zip(keys, (_value(pair[1], decode) for pair in scalar.values), strict=True))
    if isinstance(scalar, pa.ListScalar):
        return [_value(item, decode) for item in scalar.values]
    if isinstance(scalar, pa.JsonScalar):
        try:
            return decode(scalar.as_py())
        except ValueError:
            return scalar.as_py()
    if isinstance(scalar, pa.DictionaryScalar):
        return _value(scalar.value, decode)
    if isinstance(scalar, _MOMENTS):
        try:
            text = scalar.cast(pa.string()).as_py()
        except pa.ArrowInvalid:  # a time zone that is not known
            return scalar.value
        return scalar.value if text.startswith("<value out of range") else text
    return scalar.value if isinstance(scalar, pa.DurationScalar) else scalar.as_py()


def _as_datasets_wrote(text: str) -> Any:
    """Return the value that `datasets` stored as `text` in a `Json()` column.

    It stores strings that are JSON themselves as they are, and all other values as JSON. So a text is such a string if
    it is spelled as `datasets` never does: with white space, a `/` or other than ASCII characters; or if it is `null`,
    since null is stored as such.
    """
    value = json.loads(text)
    is_its_own = text.isascii() and not re.search(r"\s", _STRINGS.sub("", text)) and not re.search(r"(?<!\\)/", text)
    return value if is_its_own and value is not None else text
