"""Open the files and data sets that a run file names, and read their records one by one.

spec                            records
notes.txt (.text .md .rst)      one record, {"text": the whole file}
data.jsonl (.json)              one record per line, or a JSON array of records
data.csv (.tsv)                 one record per row, with the names in the first row as keys
data.parquet                    one record per row
folder/                         all such files in the folder
unicode-names[:split]           a data set of the catalog, as JSONL inside the package
org/name[[:config]:split]       a data set on the Hugging Face Hub
"""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path, PurePath
from typing import IO, Any, Literal

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from moetune.errors import UserError, suggest
from moetune.files import expanded, names_in
from moetune.json_files import UNIQUE_KEYS, DuplicateKeyError
from moetune.models.hub.reach import UNREACHABLE, hub_is_reachable
from moetune.training.data.json_array import JsonArray

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
JSON_SUFFIXES = (".jsonl", ".json")
CSV_SUFFIXES = {".csv": ",", ".tsv": "\t"}
RECORD_SUFFIXES = (*JSON_SUFFIXES, *CSV_SUFFIXES, ".parquet")
READABLE_SUFFIXES = (*TEXT_SUFFIXES, *RECORD_SUFFIXES)
# A spec with such an ending means a file, even if it does not exist; names on the hub may contain other dots.
FILE_SUFFIXES = (*READABLE_SUFFIXES, ".gz", ".zst", ".zip", ".xml", ".html", ".yaml", ".yml", ".py")
UTF8_MARK = b"\xef\xbb\xbf"
_SOME_BYTES = 2**16
_ROWS = 32  # rows of a Parquet file that are in memory at the same time


@dataclass(frozen=True)
class Row:
    """A record, or the reason why it could not be read.

    Attributes:
        number: number of the record's line or row, from 1.
        value: the record as Python values; None if it could not be read.
        problem: why the record could not be read; None if it was read.
    """

    number: int
    value: Any = None
    problem: str | None = None


@dataclass(frozen=True)
class Source:
    """A file or data set, whose rows can be iterated over once.

    Attributes:
        name: the source's name in messages, such as `data.jsonl`.
        unit: what `Row.number` counts, for messages such as `line 3`.
        rows: a record, or the reason why it cannot be read, in each `Row`.
    """

    name: str
    unit: Literal["line", "row", "record"]
    rows: Iterable[Row]


def open_sources(spec: str) -> list[Source]:
    """Open what a spec names: a file, a folder, a data set of the catalog, or one on the hub, tried in this order.

    A folder gives one source for each file.

    Raises:
        UserError: nothing has this name, or it cannot be read. The message suggests the nearest existing name.
    """
    path = expanded(spec)
    if path.is_file():
        return [_file_source(spec, path)]
    if path.is_dir():
        return [_file_source(str(Path(spec, file.relative_to(path))), file) for file in _files_in(spec, path)]
    if path.exists():
        raise UserError(f"{spec!r} is a pipe or a device, and data are read more than once; write them to a file")
    name, _, rest = spec.partition(":")
    if name in catalog_names():
        return [_catalog_source(spec, name, rest or "train")]
    if looks_like_a_file(spec):
        raise UserError(f"no such file: {spec!r}.{_nearest(path)}")
    if "/" not in name:
        known = ", ".join(catalog_names()) or "none"
        raise UserError(
            f"{spec!r} is neither a file nor a catalog data set (catalog: {known}); "
            f"a hub data set is written organisation/name.{_nearest(path)}"
        )
    config, _, split = rest.rpartition(":")
    return [_hub_source(spec, name, config or None, split or "train")]


def _files_in(spec: str, folder: Path) -> list[Path]:
    """Return the record files below a folder, sorted, or else its text files; `UserError` if it has neither."""
    files = sorted(f for f in folder.rglob("*") if f.is_file() and not f.name.startswith("."))
    for suffixes in (RECORD_SUFFIXES, TEXT_SUFFIXES):
        if found := [file for file in files if file.suffix.lower() in suffixes]:
            return found
    raise UserError(f"folder {spec!r} holds no file that can be read: {', '.join(READABLE_SUFFIXES)}")


def catalog_names() -> list[str]:
    """Return the names of the data sets that ship with moetune, sorted."""
    root = _catalog_root()
    return sorted(item.name for item in root.iterdir() if item.is_dir()) if root.is_dir() else []


def _catalog_root() -> Traversable:
    return resources.files("moetune.models.catalog") / "data"


def looks_like_a_file(spec: str) -> bool:
    """Return whether a spec is spelled like a path, whether or not the file exists."""
    name = spec.partition(":")[0]
    return (
        PurePath(name).suffix.lower() in FILE_SUFFIXES
        or "\\" in spec
        or spec.startswith((".", "/", "~"))
        or name.count("/") > 1
    )


def _nearest(path: Path) -> str:
    """Return ` Did you mean …?` with the most similar name beside `path` or in the catalog; "" if none is similar."""
    return suggest(path.name.partition(":")[0], [*names_in(path.parent), *catalog_names()])


def _file_source(spec: str, path: Path) -> Source:
    suffix = path.suffix.lower()
    if suffix not in READABLE_SUFFIXES:
        raise UserError(f"{spec!r}: files ending in {suffix!r} are not read; use {', '.join(READABLE_SUFFIXES)}")
    try:
        if suffix in JSON_SUFFIXES:
            with path.open("rb") as handle:
                is_array = _begins_an_array(handle)
            if is_array:
                return Source(spec, "record", _array_rows(path.open("rb")))
            return Source(spec, "line", _json_rows(path.open("rb")))
        if suffix in CSV_SUFFIXES:
            return Source(spec, "line", _csv_rows(path, CSV_SUFFIXES[suffix]))
        if suffix in TEXT_SUFFIXES:
            return Source(spec, "line", _text_rows(path.read_bytes()))
        return Source(spec, "row", _parquet_rows(spec, pq.ParquetFile(path)))
    except OSError as error:
        raise UserError(f"{spec!r} cannot be read: {error.strerror or error}") from None
    except pa.ArrowException as error:
        raise UserError(f"{spec!r} is not a valid Parquet file: {error}") from None


def _catalog_source(spec: str, name: str, split: str) -> Source:
    folder = _catalog_root() / name
    splits = sorted(item.name.removesuffix(".jsonl") for item in folder.iterdir() if item.name.endswith(".jsonl"))
    if split not in splits:
        raise UserError(
            f"{spec!r}: catalog data set {name} has no split {split!r}; "
            f"it has {', '.join(splits)}.{suggest(split, splits)}"
        )
    return Source(spec, "line", _json_rows((folder / f"{split}.jsonl").open("rb")))


def _hub_source(spec: str, name: str, config: str | None, split: str) -> Source:
    bars_were_on = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        kept = Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")
        if not kept.is_dir() and not hub_is_reachable():  # datasets would retry many times
            raise OSError(UNREACHABLE)
        rows = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        raise UserError(
            f"hub data set {spec!r} cannot be loaded: {reason}.{_nearest(Path(spec))} "
            f"Offline, use a local file or one of the catalog: {', '.join(catalog_names()) or 'none'}."
        ) from None
    finally:
        if bars_were_on:
            datasets.enable_progress_bars()
    return Source(spec, "row", (Row(number, value) for number, value in enumerate(rows, 1)))


def _text_rows(raw: bytes) -> Iterator[Row]:
    try:
        text = raw.removeprefix(UTF8_MARK).decode()
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        yield Row(line, problem="not valid UTF-8")
        return
    if text.strip():
        yield Row(1, {"text": text})


def _begins_an_array(handle: IO[bytes]) -> bool:
    first = handle.read(_SOME_BYTES).removeprefix(UTF8_MARK)
    while first and not first.strip():
        first = handle.read(_SOME_BYTES)
    return first.strip().startswith(b"[")


def _array_rows(handle: IO[bytes]) -> Iterator[Row]:
    """Yield the values of a JSON array; a syntax error is reported as the problem of the record that it is in."""
    number = 0
    with handle:
        array = JsonArray(handle)
        try:
            for number, value in enumerate(array, 1):
                yield Row(number, value)
        except (ValueError, RecursionError) as error:
            where = array.where(error) if isinstance(error, json.JSONDecodeError) else (1, 1)
            yield Row(number + 1, problem=_not_json(error, *where))


def _csv_rows(path: Path, delimiter: str) -> Iterator[Row]:
    """Yield each row as an object, with the names in the first row as keys; empty fields become null."""
    csv.field_size_limit(2**31 - 1)  # the default is 131,072 characters
    with path.open(encoding="utf-8-sig", newline="") as handle:
        reader = csv.DictReader(handle, delimiter=delimiter, strict=True)
        last = 1
        try:
            for value in reader:
                number, last = last + 1, reader.line_num  # a quoted field may hold line breaks
                if None in value:
                    names = len(reader.fieldnames or ())
                    yield Row(
                        number, problem=f"more fields than the first line names ({names}); quote those with commas"
                    )
                else:
                    yield Row(number, {name: field or None for name, field in value.items()})
        except (csv.Error, UnicodeDecodeError) as error:
            reason = "not valid UTF-8" if isinstance(error, UnicodeDecodeError) else f"not valid CSV: {error}"
            yield Row(last + 1, problem=reason)


def _json_rows(handle: IO[bytes]) -> Iterator[Row]:
    """Yield the record of each line.

    Only a line feed ends a line, because JSON strings may contain other line separators, such as U+2028.
    """
    with handle:
        for number, raw in enumerate(handle, 1):
            line = raw.removeprefix(UTF8_MARK).strip() if number == 1 else raw.strip()
            if not line:
                continue
            try:
                yield Row(number, UNIQUE_KEYS.decode(line.decode()))
            except (ValueError, RecursionError) as error:
                yield Row(number, problem=_not_json(error, column=getattr(error, "colno", 1)))


def _not_json(error: Exception, line: int = 1, column: int = 1) -> str:
    if isinstance(error, DuplicateKeyError):
        return str(error)
    if isinstance(error, UnicodeDecodeError):
        return "not valid UTF-8"
    if not isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error}"
    return f"not valid JSON: {error.msg} ({f'line {line}, ' if line > 1 else ''}column {column})"


def _parquet_rows(spec: str, file: pq.ParquetFile) -> Iterator[Row]:
    number = 0
    with file:
        try:
            for batch in file.iter_batches(batch_size=_ROWS):
                # Convert one row at a time: Python values take many times the memory of Arrow's.
                batch = batch.cast(pa.schema([field.with_type(_without_dates(field.type)) for field in batch.schema]))
                for at in range(len(batch)):
                    number += 1
                    yield Row(number, batch.slice(at, 1).to_pylist()[0])
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{spec!r} is damaged after row {number}: {error}") from None


def _without_dates(type: pa.DataType) -> pa.DataType:
    """Return the type with dates, times and durations as integers: Python cannot represent all of their values."""
    if pa.types.is_temporal(type):
        return pa.int64() if type.bit_width == 64 else pa.int32()
    if pa.types.is_list(type):
        return pa.list_(type.value_field.with_type(_without_dates(type.value_type)))
    if pa.types.is_struct(type):
        return pa.struct([field.with_type(_without_dates(field.type)) for field in type])
    return type
