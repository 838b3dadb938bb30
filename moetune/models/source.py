"""From what a user calls a model (`model.path`) to its configuration and the place of its weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moetune.documents import read_json
from moetune.errors import UserError, shown, suggest
from moetune.files import expanded
from moetune.models.catalog import CatalogModel, find_model, model_names
from moetune.models.hub.reach import UNREACHABLE, how_to_get, hub_is_reachable
from moetune.models.structure import require_causal_lm

_MOST_LAYERS = 1000
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class ModelSource:
    """A model that was found.

    Attributes:
        name: catalog name, folder name or hub id.
        folder: where `from_pretrained` can load weights and tokenizer from: a local folder or a hub id. None
            for a catalog model that is published nowhere.
    """

    name: str
    config: PretrainedConfig
    folder: str | None


def find_model_source(path: str) -> ModelSource:
    """Finds a model by catalog name, as a local folder with a config.json, or by hub id, in this order.

    Only the configuration is read. Catalog names and folders need no network. Code of a model never runs.

    Raises:
        UserError: no such model, or its configuration is broken or describes no causal language model.
    """
    entry = find_model(path)
    folder = expanded(path)
    is_folder = (folder / "config.json").is_file()
    if entry is not None and not is_folder:
        source = _from_catalog(entry)
    elif path.strip() and folder.exists():
        source = _from_folder(path)
    elif _HUB_ID.fullmatch(path):
        source = _from_hub(path)
    else:
        known = model_names()
        hint = suggest(path, known) or f" The catalog has: {', '.join(known)}."
        raise UserError(
            f"model {path!r}: neither a catalog name, nor a folder that exists, nor a hub id (owner/name).{hint}"
        )
    source.config.return_dict = True  # how outputs come is ours to say
    source.config.output_attentions = source.config.output_hidden_states = False
    try:
        require_causal_lm(source.config)
    except UserError as error:
        raise UserError(f"model {path!r}: {error}") from None
    return source


def _from_catalog(entry: CatalogModel) -> ModelSource:
    config = CONFIG_MAPPING[entry.config["model_type"]].from_dict(copy.deepcopy(entry.config))
    folder = entry.hub_id if entry.folder is None else str(entry.folder)
    return ModelSource(entry.name, config, folder)


def _from_folder(path: str) -> ModelSource:
    folder = expanded(path)
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"model {path!r}: no config.json in it; give the folder that from_pretrained would load")
    raw = read_json(file, dict[str, Any], f"model {path!r}: config.json")
    layers = max(_layers_in(raw), default=0)
    if layers > _MOST_LAYERS:
        raise UserError(
            f"model {path!r}: config.json says {shown(layers)} layers, and no model has more than {_MOST_LAYERS:,}"
        )
    if not isinstance(raw.get("model_type"), str):
        raise UserError(f"model {path!r}: config.json has no model_type")
    if raw["model_type"] not in CONFIG_MAPPING:
        hint = suggest(raw["model_type"], CONFIG_MAPPING.keys())
        raise UserError(
            f"model {path!r}: transformers does not know model type {raw['model_type']!r}, and code from a "
            f"model folder is never run.{hint}"
        )
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers validates with many error types; each means a wrong config.json
        raise UserError(f"model {path!r}: config.json is not valid: {_one_line(error)}") from None
    return ModelSource(folder.resolve().name, config, str(folder))


def _layers_in(raw: Any) -> Iterator[int]:
    """Every number of layers. Each layer is built, if only on the meta device: too many would take forever."""
    for key, value in raw.items() if isinstance(raw, dict) else ():
        yield from _layers_in(value)
        if isinstance(value, int) and re.search(r"layers?$", key):
            yield value


def _from_hub(path: str) -> ModelSource:
    reachable = hub_is_reachable()
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=not reachable, trust_remote_code=False)
    except Exception as error:  # no network, no such repository, gated, broken config, remote code: all end here
        hint = suggest(path, [model for name in model_names() if (model := _hub_id(name)) is not None])
        why = _one_line(error) if reachable else UNREACHABLE
        raise UserError(
            f"model {path!r}: no such folder, and the hub did not give its configuration: {why}{hint} "
            f"{how_to_get(path)}"
        ) from None
    return ModelSource(path, config, path)


def _hub_id(name: str) -> str | None:
    entry = find_model(name)
    return None if entry is None else entry.hub_id


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:297]}..."
