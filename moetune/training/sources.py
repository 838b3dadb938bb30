"""Where records come from: local files, catalog and hub data sets. What a record means is for `records`.

spec                         -> rows
notes.txt (.text .md .rst)      one record, {"text": the whole file}
data.jsonl (.json)              one record a line
data.parquet                    one record a row
unicode-names[:split]           a catalog data set, JSONL inside the package
org/name[:split]                a hub data set
"""

from __future__ import annotations

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
from moetune.files import expanded

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
JSON_SUFFIXES = (".jsonl", ".json")
READABLE_SUFFIXES = (*TEXT_SUFFIXES, *JSON_SUFFIXES, ".parquet")
# A spec that ends like this was meant to be a file, whether it exists or not; hub names may hold other dots.
FILE_SUFFIXES = (
    *READABLE_SUFFIXES,
    ".csv",
    ".tsv",
    ".gz",
    ".zst",
    ".zip",
    ".xml",
    ".html",
    ".yaml",
    ".yml",
    ".py",
)
UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Row:
    """One record as it was read, or the reason why it could not be. `number` counts from 1."""

    number: int
    value: Any = None
    problem: str | None = None


@dataclass(frozen=True)
class Source:
    """Rows to read once, with what an error calls them: `data.jsonl`, `line 3`."""

    name: str
    unit: Literal["line", "row"]
    rows: Iterable[Row]


def open_source(spec: str) -> Source:
    """Finds what a spec names. A file that exists wins over a catalog name, and that over the hub.

    Raises:
        UserError: nothing of that name exists, or it cannot be read; the message names the nearest that does.
    """
    path = expanded(spec)
    if path.is_file():
        return _file_source(spec, path)
    if path.is_dir():
        raise UserError(f"{spec!r} is a folder; name one file in it")
    name, _, split = spec.partition(":")
    if name in catalog_names():
        return _catalog_source(spec, name, split or "train")
    if _looks_like_a_file(spec):
        raise UserError(f"no such file: {spec!r}.{_nearest(path)}")
    if "/" not in name:
        known = ", ".join(catalog_names()) or "none"
        raise UserError(
            f"{spec!r} is neither a file nor a catalog data set (catalog: {known}); "
            f"a hub data set is written organisation/name.{_nearest(path)}"
        )
    return _hub_source(spec, name, split or "train")


def catalog_names() -> list[str]:
    """The data sets that ship with moetune, sorted."""
    root = _catalog_root()
    return sorted(item.name for item in root.iterdir() if item.is_dir()) if root.is_dir() else []


def _catalog_root() -> Traversable:
    return resources.files("moetune") / "catalog" / "data"


def _looks_like_a_file(spec: str) -> bool:
    name = spec.partition(":")[0]
    return (
        PurePath(name).suffix.lower() in FILE_SUFFIXES
        or "\\" in spec
        or spec.startswith((".", "/", "~"))
        or name.count("/") > 1
    )


def _nearest(path: Path) -> str:
    """` Did you mean …?` with the nearest name beside `path` or in the catalog, or nothing."""
    try:
        neighbours = [item.name for item in path.parent.iterdir()]
    except OSError:
        neighbours = []
    return suggest(path.name.partition(":")[0], [*neighbours, *catalog_names()])


def _file_source(spec: str, path: Path) -> Source:
    suffix = path.suffix.lower()
    if suffix not in READABLE_SUFFIXES:
        raise UserError(f"{spec!r}: files ending in {suffix!r} are not read; use {', '.join(READABLE_SUFFIXES)}")
    try:
        if suffix in JSON_SUFFIXES:
            return Source(spec, "line", _json_rows(spec, path.open("rb")))
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
    return Source(spec, "line", _json_rows(spec, (folder / f"{split}.jsonl").open("rb")))


def _hub_source(spec: str, name: str, split: str) -> Source:
    bars_were_on = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(name, split=split)
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


def _json_rows(spec: str, handle: IO[bytes]) -> Iterator[Row]:
    """Splits at line feeds alone: JSON strings may hold U+2028 and others that `splitlines` cuts at."""
    started = False
    with handle:
        for number, raw in enumerate(handle, 1):
            line = raw.removeprefix(UTF8_MARK).strip() if number == 1 else raw.strip()
            if not line:
                continue
            if not started and line.startswith(b"["):
                raise UserError(f"{spec!r} holds a JSON array; write one record a line (JSONL)")
            started = True
            yield _parse_json(number, line)


def _parse_json(number: int, line: bytes) -> Row:
    try:
        return Row(number, json.loads(line.decode()))
    except UnicodeDecodeError:
        return Row(number, problem="not valid UTF-8")
    except json.JSONDecodeError as error:
        return Row(number, problem=f"not valid JSON: {error.msg} (column {error.colno})")
    except (ValueError, RecursionError) as error:
        return Row(number, problem=f"not valid JSON: {error}")


def _parquet_rows(spec: str, file: pq.ParquetFile) -> Iterator[Row]:
    number = 0
    with file:
        try:
            for batch in file.iter_batches(batch_size=1024):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(number, value)
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{spec!r} is damaged after row {number}: {error}") from None
