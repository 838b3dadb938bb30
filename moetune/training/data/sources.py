"""Open a run file's files and data sets, read records one by one.

spec                            records
notes.txt (.text .md .rst)      one record, {"text": the whole file}
data.jsonl (.json .ndjson)      one record per line, a JSON array of records, or an object of such arrays, its splits
data.csv (.tsv)                 one record per row, with the names in the first row as keys
data.parquet, data.arrow        one record per row
folder/                         the files of a split, as `datasets` finds them; what `save_to_disk` wrote
unicode-names                   a data set of the catalog, as JSONL inside the package
org/name                        a data set on the Hugging Face Hub

Files may be compressed (.gz .bz2 .xz .zst .lz4). After a colon comes the split, before it the configuration, if there
are any: `folder:test`, `org/name:en:test`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path, PurePath
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from moetune.config.schema import path_and_split
from moetune.errors import UserError, note, one_line, reading, suggest
from moetune.files import expanded, names_in
from moetune.json_files import read_json
from moetune.models.hub.reach import UNREACHABLE, hub_is_reachable
from moetune.training.data.files import llama_factory
from moetune.training.data.files.folder import files_of_split
from moetune.training.data.files.lines import csv_rows, json_source, text_rows
from moetune.training.data.files.opening import (
    COMPRESSED,
    DAMAGED,
    DELIMITERS,
    JSON_ENDINGS,
    RECORD_ENDINGS,
    TEXT_ENDINGS,
    opened,
    type_of,
)
from moetune.training.data.files.source import Note, Row, Source, choose_split
from moetune.training.data.files.tables import arrow_batches, dataset_batches, parquet_batches, table_rows

READABLE = (*TEXT_ENDINGS, *RECORD_ENDINGS)
# A spec with such an ending means a file, even if it does not exist; names on the hub may contain other dots.
FILE_SUFFIXES = (*READABLE, *COMPRESSED, ".zip", ".xml", ".html", ".yaml", ".yml", ".py")


@dataclass(frozen=True)
class _DatasetDict:
    """`dataset_dict.json`, which `datasets` writes."""

    splits: list[str]


def open_sources(spec: str, *, held_out: bool = False, note: Note = note) -> list[Source]:
    """Open what a spec names: a file, a folder, a data set of the catalog, or one on the hub, tried in this order.

    Args:
        held_out: whether the records are for evaluation, which decides which split is read if `spec` names none.
        note: is told what the data set holds and is not read; prints it on stderr by default.

    Returns:
        A source for each file of a folder, else one.

    Raises:
        UserError: nothing has this name, it cannot be read, or has no such split. The message suggests the nearest
            existing name.
    """
    expanded(spec)  # raises for what cannot be a path
    name, after = path_and_split(spec)
    path = expanded(name)
    if not path.exists():
        name, _, after = spec.partition(":")
    config, _, split = after.rpartition(":")
    if path.is_dir():
        return _folder_sources(name, path, config or None, split or None, held_out, note)
    if path.is_file():
        if config:
            raise UserError(f"{spec!r}: a file has no configurations; write {name}:SPLIT, or {name}")
        return [_file_source(name, path, split or None, held_out, note)]
    if path.exists():
        raise UserError(f"{spec!r} is a pipe or a device, and data are read more than once; write them to a file")
    if name in catalog_names():
        files = {file.stem: file for file in sorted((_catalog_root() / name).glob("*.jsonl"))}
        return [_file_source(spec, files[choose_split(name, files, split or None, held_out)], None, held_out, note)]
    if looks_like_a_file(spec):
        raise UserError(f"no such file: {spec!r}.{_nearest(path)}")
    if "/" not in name:
        known = ", ".join(catalog_names()) or "none"
        raise UserError(
            f"{spec!r} is neither a file nor a catalog data set (catalog: {known}); "
            f"a hub data set is written organisation/name.{_nearest(path)}"
        )
    return [_hub_source(spec, name, config or None, split or None, held_out, note)]


def catalog_names() -> list[str]:
    """Return the names of the data sets that ship with moetune, sorted."""
    return sorted(folder.name for folder in _catalog_root().glob("*/"))


def _catalog_root() -> Path:
    return Path(str(resources.files("moetune.models.catalog"))) / "data"


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


def _folder_sources(
    name: str, folder: Path, config: str | None, split: str | None, held_out: bool, note: Note
) -> list[Source]:
    if (folder / "dataset_dict.json").is_file() or all(
        (folder / file).is_file() for file in ("state.json", "dataset_info.json")
    ):
        return _saved_sources(name, folder, split, held_out, note)
    if entries := llama_factory.entries(folder):
        return [
            replace(source, rows=llama_factory.converted(entry, source.rows))
            for entry in llama_factory.chosen(name, folder, entries, split, note)
            for source in open_sources(str(Path(name, entry["file_name"])), held_out=held_out, note=note)
        ]
    files = files_of_split(name, folder, config, split, held_out, note)
    return [_file_source(str(Path(name, file.relative_to(folder))), file, None, held_out, note) for file in files]


def _saved_sources(name: str, folder: Path, split: str | None, held_out: bool, note: Note) -> list[Source]:
    """Return the files of a data set that `save_to_disk` of `datasets` wrote, or of a split of several."""
    inside = ""
    if (folder / "dataset_dict.json").is_file():
        splits = read_json(folder / "dataset_dict.json", _DatasetDict).splits
        inside = choose_split(name, splits, split, held_out)
        if passed_over := [key for key in splits if key != inside]:
            note(f"{name!r}: the split {inside!r} is read; passed over: {', '.join(passed_over)}")
    state = read_json(folder / inside / "state.json", dict[str, Any])
    if not inside and split is not None:
        choose_split(name, [str(state.get("_split") or "train")], split, held_out)
    with reading(repr(str(Path(name, inside, "state.json")))):
        files = [str(Path(inside, Path(file["filename"]).name)) for file in state["_data_files"]]
    return [_file_source(str(Path(name, file)), folder / file, None, held_out, note) for file in files]


def _file_source(name: str, path: Path, split: str | None, held_out: bool, note: Note) -> Source:
    ending = type_of(path.name)
    if ending not in READABLE:
        raise UserError(
            f"{name!r}: files ending in {ending or path.suffix!r} are not read; use {', '.join(READABLE)}, which may "
            f"be compressed ({', '.join(COMPRESSED)})"
        )
    try:
        opened(path, name).close()
        if ending in JSON_ENDINGS:
            return _checked(json_source(name, path, split, held_out, note))
        choose_split(name, ["train"], split, held_out)
        if ending in DELIMITERS:
            rows = csv_rows(name, opened(path, name), DELIMITERS[ending])
            return _checked(Source(name, "line", rows))
        if ending in TEXT_ENDINGS:
            return _checked(Source(name, "line", text_rows(opened(path, name))))
        if path.suffix.lower() in COMPRESSED:
            raise UserError(f"{name!r}: {ending} files are not read from within {path.suffix}; unpack it first")
        batches = arrow_batches(path) if ending == ".arrow" else parquet_batches(pq.ParquetFile(path, pre_buffer=False))
        return _checked(Source(name, "row", table_rows(name, batches)))
    except DAMAGED as error:
        if isinstance(error, pa.ArrowException) and ending == ".parquet":
            raise UserError(f"{name!r} is not a valid Parquet file: {error}") from None
        raise UserError(f"{name!r} cannot be read: {one_line(error)}") from None


def _checked(source: Source) -> Source:
    """Return a source whose rows raise `UserError` where its file is damaged."""

    def rows() -> Iterator[Row]:
        number = 0
        try:
            for row in source.rows:
                number = row.number
                yield row
        except DAMAGED as error:
            raise UserError(f"{source.name!r} is damaged after {source.unit} {number}: {one_line(error)}") from None

    return replace(source, rows=rows())


@contextmanager
def _without_bars() -> Iterator[None]:
    bars_were_on = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if bars_were_on:
            datasets.enable_progress_bars()


def _hub_source(spec: str, name: str, config: str | None, split: str | None, held_out: bool, note: Note) -> Source:
    try:
        kept = Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")
        if not kept.is_dir() and not hub_is_reachable():  # datasets would retry many times
            raise OSError(UNREACHABLE)
        with _without_bars():
            rows = datasets.load_dataset(name, config, split=split or (None if held_out else "train"))
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        raise UserError(
            f"hub data set {spec!r} cannot be loaded: {reason}.{_nearest(Path(spec))} "
            f"Offline, use a local file or one of the catalog: {', '.join(catalog_names()) or 'none'}."
        ) from None
    if isinstance(rows, datasets.DatasetDict):
        chosen = choose_split(spec, rows, None, held_out)
        if passed_over := [key for key in rows if key != chosen]:
            note(f"{spec!r}: the split {chosen!r} is read; passed over: {', '.join(passed_over)}")
        rows = rows[chosen]
    return _checked(Source(spec, "row", table_rows(spec, dataset_batches(rows))))
