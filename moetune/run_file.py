"""Reading a run file: YAML, `--set` overrides, and every problem at once, each with the nearest valid name.

`load_run_config` is the one door. Nothing here imports torch.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ValidationError

from moetune.config import PartOptimizers, RunConfig
from moetune.errors import UserError, suggest


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML that refuses a key written twice; plain YAML keeps the last one and says nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # refused by what is called below
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is written twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)  # ValueError: a date such as 2025-02-30


def load_run_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a run file and applies `a.b=value` overrides, in order.

    Raises:
        UserError: the file is missing, is not YAML, or does not validate; every problem is listed.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"run file {str(path)!r} cannot be read: {reason}") from None
    try:
        raw = yaml.load(text, Loader=_UniqueKeyLoader)
    except _YAML_ERRORS as error:
        reason = str(error).replace('"<unicode string>", ', "")
        raise UserError(f"run file {str(path)!r} is not valid YAML: {reason}") from None
    if not isinstance(raw, dict):
        raise UserError(f"run file {str(path)!r} must hold a mapping with model: and adapt:")
    _find_beside(raw, path)
    return read_run_config(raw, overrides, f"run file {str(path)!r}")


def read_run_config(raw: dict[str, Any], overrides: Sequence[str], what: str) -> RunConfig:
    """Validates what a run file holds, `a.b=value` overrides applied; `what` says where it is from.

    Raises:
        UserError: it does not validate; every problem is listed.
    """
    for override in overrides:
        _apply_override(raw, override)
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        problems = "\n".join(f"  {line}" for line in _explain(error))
        raise UserError(f"{what}:\n{problems}") from None


_PATHS = (
    ("model", "path"), ("adapt", "start_from"), ("data", "train"), ("data", "eval"), ("data", "chat_template"),
    ("parallel", "load"), ("parallel", "deepspeed"),
)  # fmt: skip
"""What a run file may name by a path: relative to its own folder, else to the working directory."""
_FILE_NAME = re.compile(r"[./~].*|.*\.(jsonl?|csv|tsv|parquet|txt|text|md|rst|jinja2?|j2)", re.DOTALL)


def _find_beside(raw: dict[str, Any], run_file: Path) -> None:
    """Makes paths that exist relative to the run file's folder absolute."""

    def found(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return [found(key, one) for one in value]
        if isinstance(value, dict) and isinstance(value.get("path"), str):
            return value | {"path": found(key, value["path"])}
        if not isinstance(value, str) or not value:
            return value
        place = run_file.absolute().parent / value
        try:
            is_there = (place / "config.json").is_file() if key == "path" else place.exists()
        except (OSError, ValueError):  # no name that a file can have
            is_there = False
        return str(place) if is_there else value

    for section, key in _PATHS:
        if isinstance(raw.get(section), dict) and key in raw[section]:
            raw[section][key] = found(key, raw[section][key])


def refuse_missing_files(config: RunConfig, run_file: Path | str) -> None:
    """Raises `UserError` for a file of data that is nowhere; other names are looked up when they are read."""
    data = config.data
    if data is None:
        return
    problems = []
    for value in (data.train, data.eval, data.chat_template):
        for one in () if value is None else (value,) if isinstance(value, str) else value:
            name = one if isinstance(one, str) else one.path
            path = Path(name).expanduser()
            if path.is_absolute() or path.exists() or not _FILE_NAME.fullmatch(name):
                continue
            beside = Path(run_file).absolute().parent / name
            places = list(dict.fromkeys((beside, path.absolute())))
            neighbours = [f.name for place in places if place.parent.is_dir() for f in place.parent.iterdir()]
            where = (
                f", neither beside the run file ({str(beside)!r}) nor in the working directory ({str(places[-1])!r})"
            )
            problems.append(
                f"no such file: {name!r}{where if len(places) > 1 else ''}.{suggest(path.name, neighbours)}"
            )
    if problems:
        raise UserError("\n".join(problems))


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"--set {override!r}: write it as section.key=value, for example train.steps=100")
    try:
        value = yaml.load(text, Loader=_UniqueKeyLoader)
    except _YAML_ERRORS:
        raise UserError(f"--set {override!r}: the value {text!r} is not valid YAML") from None
    node = raw
    for depth, part in enumerate(parts[:-1]):
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            raise UserError(f"--set {override!r}: {'.'.join(parts[: depth + 1])} holds a value, not a section")
    node[parts[-1]] = value


def _explain(error: ValidationError) -> Iterable[str]:
    """One line a problem: where, what was written, what would be valid."""
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"] if part not in _UNION_TAGS)
        match item["type"]:
            case "extra_forbidden":
                known = _fields_at(item["loc"][:-1])
                hint = suggest(str(item["loc"][-1]), known) or f" Known keys: {', '.join(known)}."
                yield f"{where}: unknown key.{hint}"
            case "missing":
                yield f"{where}: missing, and required"
            case "literal_error":
                expected = item["ctx"]["expected"]
                hint = suggest(str(item["input"]), re.findall(r"'([^']*)'", expected))
                yield f"{where}: {item['input']!r} is not valid; it may be {expected}.{hint}"
            case "model_type":
                keys = ", ".join(_fields_at(item["loc"]))
                yield f"{where}: {item['input']!r} is not a section; write keys under it. Keys: {keys}"
            case "tuple_type":
                yield f"{where}: {item['input']!r} is not a list; write [{item['input']}]"
            case "value_error":
                yield f"{where}: {item['ctx']['error']}" if where else f"{item['ctx']['error']}"
            case _:
                yield f"{where}: {item['input']!r} is not valid: {item['msg']}"


_UNION_TAGS = frozenset(
    {"literal['all','none']", "tuple[int, ...]", "tuple[int,...]", "one", "by_part", "several", "weighted"}
)


def _fields_at(location: Iterable[int | str]) -> list[str]:
    """The keys that the section at this place of the run file may hold."""
    section: type[BaseModel] = RunConfig
    for part in location:
        if part == "by_part":
            section = PartOptimizers
        elif part not in _UNION_TAGS and not isinstance(part, int):
            section = next(t for t in _leaves(section.model_fields[str(part)].annotation) if issubclass(t, BaseModel))
    return list(section.model_fields)


def _leaves(annotation: Any) -> list[type]:
    """The types in an annotation, whatever unions and annotations are around them."""
    inner = typing.get_args(annotation)
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) in (typing.Union, Annotated, tuple):
        return [leaf for option in inner for leaf in _leaves(option)]
    return [annotation] if isinstance(annotation, type) else []
