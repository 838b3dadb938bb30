"""Read run files: YAML, `--set`, all problems in one message with suggestions.

Nothing here imports torch.
"""

import os
import re
import types
import typing
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ValidationError

from moetune.config.other_names import MADE_FOR, OTHER_NAMES
from moetune.config.recipes import recipes
from moetune.config.schema import ChoiceConfig, PartOptimizers, RunConfig, data_sets, path_and_split
from moetune.errors import UserError, first_of, raise_problems, reading, shown, suggest
from moetune.files import Ledger, expanded, names_in

_MOST_BYTES = 2**16
_MOST_VALUES = 10_000  # counted after expanding YAML aliases, which can stand for more values than fit in memory
_MOST_PROBLEMS = 20


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML loader that refuses keys written twice; plain YAML keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # super().construct_mapping refuses this key
            if (text := str(key)) in seen:
                problem = f"key {shown(key)} is written twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(text)
        return super().construct_mapping(node, deep)


def _number(loader: Any, n: yaml.ScalarNode) -> Any:
    """Return a number; as text what only YAML 1.1 reads as one: 1:30, which it takes for 90, and 010, for 8."""
    return n.value if re.search(r":|^[-+]?0\d", n.value) else yaml.SafeLoader.yaml_constructors[n.tag](loader, n)


for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    _UniqueKeyLoader.add_constructor(_tag, _number)


def load_run_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and validate a run file of at most 64 KiB, with `section.key=value` overrides, applied in order.

    Paths in the file are relative to the file's folder if they exist there, else to the working directory; paths in
    overrides are tried in the other order.

    Raises:
        UserError: the file is missing, is not YAML, or does not validate. The message lists up to 20 problems.
    """
    path = expanded(path)
    what = f"run file {str(path)!r}"
    if not os.path.lexists(path):
        near = suggest(path.name, names_in(path.parent))
        if path.stem in recipes():  # the guides use paths of the repository's configs/, which has the recipes
            near = f" moetune init {path.stem} --out {path.name} writes that recipe here."
        raise UserError(f"{what} cannot be read: No such file or directory{near and '.'}{near}")
    if path.is_dir():
        raise UserError(f"{what} is a folder; give the file in it, as {path / 'run.yaml'}, which a run's folder has")
    with reading(what), path.open("rb") as file:
        text = file.read(_MOST_BYTES + 1).decode("utf-8")
    raw = parse(text, what)
    if not isinstance(raw, dict):
        raise UserError(f"{what} must hold a mapping with model: and adapt:")
    _find_beside(raw, path)
    for override in overrides:
        _apply_override(raw, override)
    _find_beside(raw, path, unless_here=True)  # for overrides, a path that exists in the working directory has priority
    return read_run_config(raw, (), what)


def read_run_config(raw: dict[str, Any], overrides: Sequence[str], what: str) -> RunConfig:
    """Apply `section.key=value` overrides, in order, to the parsed YAML `raw`, in place, and validate the result.

    Raises:
        UserError: the values do not validate. The message names the run file as `what`, and lists up to 20 problems.
    """
    for override in overrides:
        _apply_override(raw, override)
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        lines = first_of([*_explain(error)], _MOST_PROBLEMS)
        made_for = next((f" {kind}" for key, kind in MADE_FOR.items() if key in raw and "adapt" not in raw), "")
        raise UserError(f"{what}{made_for}:\n" + "\n".join(f"  {line}" for line in lines)) from None


def parse(text: str, what: str) -> Any:
    """Parse YAML text of at most 64 KiB, which messages name as `what`, into Python values; empty text is None.

    Raises:
        UserError: the text is not YAML, repeats a key, or exceeds the limits of size or number of values.
    """
    if len(text) > _MOST_BYTES:
        raise UserError(f"{what} is too large for a run file: more than {_MOST_BYTES:,} bytes")
    try:
        loader = _UniqueKeyLoader(text)
        node = loader.get_single_node()
        if node is not None and _values_in(node, {}) > _MOST_VALUES:
            raise UserError(f"{what} holds more than {_MOST_VALUES:,} values, aliases written out")
        return None if node is None else loader.construct_document(node)
    except UserError:
        raise
    except Exception as error:  # PyYAML's constructors let errors of the Python types through
        known = isinstance(error, (yaml.YAMLError, ValueError))  # other messages need the error's type
        reason = (str(error) if known else shown(error, 200)).replace('"<unicode string>", ', "")
        raise UserError(f"{what} is not valid YAML: {reason[:1000]}") from error


def _values_in(node: yaml.Node, known: dict[int, int]) -> int:
    """Count the values in a YAML node with aliases expanded; a node that contains itself counts as over the limit.

    `known` caches the numbers by `id` of the node.
    """
    if id(node) not in known:
        known[id(node)] = _MOST_VALUES + 1
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = (part for item in inner for part in (item if isinstance(item, tuple) else (item,)))
        known[id(node)] = 1 + sum(_values_in(part, known) for part in parts)
    return known[id(node)]


_PATHS = (
    ("model", "path"), ("adapt", "start_from"), ("data", "train"), ("data", "eval"), ("data", "chat_template"),
    ("parallel", "load"), ("parallel", "deepspeed"), ("adapt", "experts", "from"), ("adapt", "experts", "background"),
    ("adapt", "lora", "ids", "from"), ("adapt", "lora", "ids", "background"),
)  # fmt: skip
"""Keys of the run file that hold a path, relative to the run file's folder or else to the working directory."""
_FILE_NAME = re.compile(
    r"[./~].*|.*\.((jsonl?|ndjson|csv|tsv|parquet|arrow|txt|text|md|rst)(\.(gz|bz2|xz|zst|lz4))?|jinja2?|j2)", re.DOTALL
)
"""Names that can only mean a local file, not a data set of the hub or the catalog."""


def _find_beside(raw: dict[str, Any], run_file: Path, *, unless_here: bool = False) -> None:
    """Replace, in `raw`, each path that exists relative to the run file's folder by its absolute path.

    With `unless_here`, a path that exists relative to the working directory stays.
    """

    def located(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return [located(key, entry) for entry in value]
        if isinstance(value, dict) and isinstance(value.get("path"), str):
            return value | {"path": located(key, value["path"])}
        if not isinstance(value, str) or not value:
            return value
        folder = run_file.absolute().parent
        try:
            name, split = path_and_split(value, folder)
            is_there = (folder / name / "config.json").is_file() if key == "path" else (folder / name).exists()
            is_there = is_there and not (unless_here and Path(path_and_split(value)[0]).exists())
        except (OSError, ValueError, RuntimeError):  # the value cannot be a file name
            is_there = False
        return f"{folder / name}{split and ':'}{split}" if is_there else value

    for *sections, key in _PATHS:
        holder: Any = raw
        for section in sections:
            holder = holder.get(section) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and key in holder:
            holder[key] = located(key, holder[key])


def refuse_missing_files(config: RunConfig, run_file: Path | str) -> None:
    """Raise `UserError` if a data file named under `data:` exists neither beside `run_file` nor in the working
    directory.

    Only names with the form of a file name are checked; hub and catalog data sets are found when they are read.
    """
    if (data := config.data) is None:
        return
    names = [name for name, _ in (*data_sets(data.train), *data_sets(data.eval), *data_sets(data.chat_template))]
    refuse_missing(names, expanded(run_file).absolute().parent)


def refuse_missing(names: Iterable[str], beside: Path | None = None) -> None:
    """Raise `UserError` for local data files that exist neither in the working directory nor in the folder `beside`.

    Absolute paths, and names that may be hub or catalog data sets, are not checked.
    """
    problems = []
    for name in names:
        path = expanded(name)
        if path.is_absolute() or expanded(path_and_split(name)[0]).exists() or not _FILE_NAME.fullmatch(name):
            continue
        paths = list(dict.fromkeys((*([beside / name] if beside else []), path.absolute())))
        where = f", neither beside the run file ({str(paths[0])!r}) nor in the working directory ({str(paths[-1])!r})"
        near = suggest(path.name, [sibling for file in paths for sibling in names_in(file.parent)])
        problems.append(f"no such file: {name!r}{where if len(paths) > 1 else ''}.{near}")
    raise_problems(problems)


def refuse_existing_run(output: Path) -> None:
    """Raise `UserError` if the output folder already holds a run."""
    output = output.expanduser()
    if Ledger(output).kind == "run" and (output / "run.yaml").is_file():
        raise UserError(
            f"output {str(output)!r} already holds a run; continue it with --resume auto, replace it with "
            "--overwrite, or choose another output"
        )


def _apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in the mapping of a run file. The value is parsed as YAML.

    Setting `train.steps` removes `train.epochs`, and vice versa.

    Raises:
        UserError: the override is malformed, its value is not YAML, or a key on the way to it is not a section.
    """
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"--set {shown(override)}: write it as section.key=value, for example train.steps=100")
    if not text.strip():
        raise UserError(f"--set {shown(override)}: has no value, like an empty variable; {key}=null takes the default")
    value = parse(text, f"--set {shown(override)}: the value {shown(text)}")
    node = raw
    for depth, part in enumerate(parts[:-1]):
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            where = ".".join(parts[: depth + 1])[:80]
            raise UserError(f"--set {shown(override)}: {where} holds a value, not a section")
    node[parts[-1]] = value
    replaced = {"train.steps": "epochs", "train.epochs": "steps"}.get(".".join(parts))
    if replaced and value is not None:  # of steps and epochs, the one set last is used
        node.pop(replaced, None)


def _explain(error: ValidationError) -> Iterable[str]:
    """Yield a line for each validation problem of a run file: the key, its value, and what would be valid; one for all
    unknown keys of a section that are like none of its own."""
    unknown: dict[tuple[str, ...], list[str]] = {}
    for item in error.errors():
        where = ".".join(str(part)[:80] for part in item["loc"] if part not in _UNION_TAGS)
        value = shown(item["input"])
        bare = value.strip("'")
        match item["type"]:
            case "extra_forbidden":
                known = _fields_at(item["loc"][:-1])
                ours = OTHER_NAMES.get(str(item["loc"][-1]))
                hint = suggest(str(item["loc"][-1]), known)
                if ours is not None and ours != where:
                    hint = f" Here it is {ours}."
                if hint:
                    yield f"{where}: unknown key.{hint}"
                else:
                    unknown.setdefault((*known,), []).append(where)
            case "missing":
                yield f"{where}: missing, and required"
            case "literal_error":
                expected = item["ctx"]["expected"]
                hint = suggest(bare, re.findall(r"'([^']*)'", expected))
                yield f"{where}: {value} is not valid; it may be {expected}.{hint}"
            case "model_type":
                keys = ", ".join(_fields_at(item["loc"]))
                yield f"{where}: {value} is not a section; write keys under it. Keys: {keys}"
            case "tuple_type":
                yield f"{where}: {value} is not a list; write [{bare}]"
            case "value_error":
                yield f"{where}{where and ': '}{item['ctx']['error']}"
            case _:
                yield f"{where}: {value} is not valid: {item['msg'][:300]}"
    for keys_there, names in unknown.items():
        said = f"unknown key{'s' * (len(names) > 1)}. Known keys: {', '.join(keys_there)}."
        yield f"{', '.join(first_of(names))}: {said}"


_UNION_TAGS = frozenset((
    "literal['all','none']", "tuple[int, ...]", "tuple[int,...]", "one", "by_part", "several", "weighted", "a choice",
    "ids or layers", "word", "by layer", "[key]",
))  # fmt: skip
"""Parts of pydantic's error locations that name an alternative of a union instead of a key."""


def _fields_at(location: Iterable[int | str]) -> list[str]:
    """Return the keys that a section may have. `location` is the path to it from the top, as in pydantic's errors:
    keys, list indices and tags of unions."""
    section: type[BaseModel] = RunConfig
    for part in location:
        if part == "by_part":
            section = PartOptimizers
        elif part == "a choice":
            section = ChoiceConfig
        elif part not in _UNION_TAGS and not isinstance(part, int):
            section = next(t for t in _leaves(section.model_fields[str(part)].annotation) if issubclass(t, BaseModel))
    return [field.alias or name for name, field in section.model_fields.items()]


def _leaves(annotation: Any) -> list[type]:
    """Return the classes inside an annotation of unions, tuples and `Annotated`."""
    inner = typing.get_args(annotation)
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) in (typing.Union, Annotated, tuple):
        return [leaf for option in inner for leaf in _leaves(option)]
    return [annotation] if isinstance(annotation, type) else []
