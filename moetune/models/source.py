"""`find_model_source`: from `model.path` to a model's configuration, its weights, and their storage format."""

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moetune.errors import UserError, first_of, one_line, shown, suggest
from moetune.files import expanded
from moetune.formats.checkpoint import open_checkpoint
from moetune.formats.source_quantization import (
    SETTINGS_BESIDE,
    SourceQuantization,
    sections_with_settings,
    settings_beside,
)
from moetune.formats.table import quantization_of
from moetune.json_files import read_json
from moetune.models.catalog import CatalogModel, find_model, model_names
from moetune.models.hub.reach import UNREACHABLE, how_to_get, hub_is_reachable
from moetune.models.hub.snapshot import download, downloaded
from moetune.models.quantized_manifest import REST, QuantizedManifest, read_quantized_manifest
from moetune.models.structure import require_causal_lm
from moetune.models.tied import holds_apart, ties, untied
from moetune.tensor_files import Stored, of_another_format, read_header

ADAPTED = "moetune-adapted"
"""Model type in the checkpoints that other trainers write of adapted models."""
_DERIVED = ("head_dim", "sliding_window")
"""Settings that transformers computes from others of some types, which the checkpoint's shapes or a flag agree with."""
_OF_ADAPTERS = (".json", ".safetensors", ".bin")
_NEARLY = 0.9
"""Similarity from which on a setting that a type lacks is taken for one of its own, misspelled."""
_MOST_LAYERS = 1000
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NO_LM = re.compile(r".*For(\w*Classification|QuestionAnswering|MultipleChoice|\w*Reward\w*)")
"""Classes of models that end in a classifier in place of an LM head, as reward models do."""
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class ModelSource:
    """A model that was found, by catalog name, in a folder or on the hub.

    Attributes:
        name: catalog name, folder name or hub id.
        config: transformers' configuration of the model; if `is_apart`, one that ties nothing.
        folder: the local folder or hub id that `from_pretrained` loads weights and tokenizer from; None for a catalog
            model without published weights.
        quantization: the format in which the weights are stored there.
        quantized_base: the manifest, if `moetune quantize` wrote the folder; else None.
        is_apart: whether the weights on this machine hold an LM head and an embedding that config.json ties.
    """

    name: str
    config: PretrainedConfig
    folder: str | None
    quantization: SourceQuantization
    quantized_base: QuantizedManifest | None = None
    is_apart: bool = False

    def local_folder(self) -> Path | None:
        """Return the folder of the weights on this machine; None if there is none or its files are incomplete."""
        if self.folder is None:
            return None
        return Path(self.folder) if Path(self.folder).is_dir() else downloaded(self.folder)

    def weights(self) -> Path:
        """Return the folder of the weights, and download them first if they are not on this machine.

        Raises:
            UserError: the model has no published weights, or they cannot be downloaded.
        """
        if self.folder is None:
            raise UserError(f"model {self.name!r} has no weights to load; use model.weights=random")
        return Path(self.folder) if Path(self.folder).is_dir() else download(self.folder)

    def local_folders(self) -> list[Path]:
        """Return the folder of the weights, if they are on this machine, and for a quantized base also that of the
        checkpoint that was quantized."""
        quantized = None if self.quantized_base is None else self.quantized_base.source
        return [folder for folder in (self.local_folder(), quantized) if folder is not None]

    def with_tensors(self) -> "ModelSource":
        """Return the source as the weights on this machine have it, if there are any: untied if they hold apart what
        the configuration ties, as transformers loads them.

        Raises `UserError` if it cannot be untied, because it ties more.
        """
        folder = self.local_folder() if ties(self.config) else None
        if folder is None:
            return self
        stored: Mapping[str, Stored] = {}
        with suppress(UserError):  # what is damaged is refused where it is read
            stored = open_checkpoint(folder) if self.quantized_base is None else read_header(folder / REST)
        if holds_apart(self.config, stored):
            return replace(self, config=untied(self.config), is_apart=True)
        return self

    def checkpoint(self) -> Path:
        """Return the folder of the published checkpoint; for a quantized base, of the checkpoint that was quantized.

        Raises:
            UserError: the checkpoint is neither on this machine nor can it be downloaded.
        """
        if self.quantized_base is None:
            return self.weights()
        original = self.quantized_base.source
        if not original.is_dir():
            raise UserError(
                f"model.path: {self.folder!r} is a quantized base; an export needs the checkpoint that was quantized, "
                f"and {str(original)!r} is gone"
            )
        return original


def find_model_source(path: str) -> ModelSource:
    """Find a model by `model.path`: a catalog name, a local folder or a hub id.

    A local folder with a config.json takes precedence over a catalog name. Read are the configuration, for a quantized
    base the manifest, and two weights that the configuration ties, if the files hold both. Catalog names and folders
    need no network. A model's own code never runs.

    Raises:
        UserError: no such model exists; its configuration is invalid or not of a causal language model; or a quantized
            base is damaged or incomplete.
    """
    entry = find_model(path)
    folder = expanded(path)
    is_folder = (folder / "config.json").is_file()
    if entry is not None and not is_folder:
        source = _of(entry.name, _catalog_config(entry), entry.hub_id if entry.folder is None else str(entry.folder))
    elif path.strip() and folder.exists():
        source = _of(folder.resolve().name, _config_in(path, folder), str(folder))
    elif _HUB_ID.fullmatch(path):
        source = _of(path, _config_from_hub(path), path)
    else:
        known, on_hub = model_names(), re.search(r"(?:huggingface\.co|hf\.co|hf:/)/([\w-][\w.-]*/[\w.-]+)", path)
        hint = suggest(path, known) or f" The catalog has: {', '.join(known)}."
        hint = hint if on_hub is None else f" Give {on_hub[1]}."
        raise UserError(
            f"model {path!r}: neither a catalog name, nor a folder that exists, nor a hub id (owner/name).{hint}"
        )
    source.config.return_dict = True  # the format of outputs does not depend on the model's config.json
    source.config.output_attentions = source.config.output_hidden_states = False
    try:
        require_causal_lm(source.config)
    except UserError as error:
        raise UserError(f"model {path!r}: {error}") from None
    if classifier := next(filter(_NO_LM.fullmatch, source.config.architectures or ()), None):
        raise UserError(
            f"model {path!r} is a {classifier} (architectures in config.json), which has no LM head; give the model "
            "that it was made of"
        )
    return source.with_tensors()


def _of(name: str, config: PretrainedConfig, folder: str | None) -> ModelSource:
    manifest, settings = None if folder is None else read_quantized_manifest(Path(folder)), quantization_of(config)
    if (dtype := getattr(config, "dtype", None)) not in _DTYPES:  # no model is built or quantized in it
        if getattr(dtype, "itemsize", 0) == 1 and not settings.method:  # codes without settings that say their scales
            settings = replace(settings, method=f"dtype {str(dtype).removeprefix('torch.')}", is_read=False)
        config.dtype = None
    if manifest is not None:  # its config.json is the original's
        among = settings.base if isinstance(settings.base, str) else None
        settings = replace(manifest.quantization, only=settings.only, left_out=settings.left_out, among=among)
    return ModelSource(name, config, folder, settings, manifest)


def _catalog_config(entry: CatalogModel) -> PretrainedConfig:
    return CONFIG_MAPPING[entry.config["model_type"]].from_dict(copy.deepcopy(entry.config))


def _config_in(path: str, folder: Path) -> PretrainedConfig:
    """Read the configuration of a local folder, which messages name as the user wrote it (`path`).

    Raises `UserError` if there is no valid config.json, or transformers does not support its model type.
    """
    file = folder / "config.json"
    if folder.is_file():
        raise UserError(f"model {path!r} is a file; give its folder{of_another_format(folder.parent)}")
    if not file.is_file():
        kinds = [(depth, name) for depth in ("*", "snapshots/*") for name in ("config.json", "adapter_config.json")]
        below = sorted({str(found.parent) for depth, name in kinds for found in folder.glob(f"{depth}/{name}")})
        raise UserError(
            f"model {path!r}: no config.json in it; give the folder that from_pretrained would load"
            f"{of_another_format(folder)}{'; there is one in ' * bool(below)}{' and in '.join(first_of(below, 3))}"
        )
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
        if raw["model_type"] == ADAPTED:
            hint = " A trainer saved it from what moetune.build made: resume it (resume_from_checkpoint), then export."
        raise UserError(
            f"model {path!r}: transformers does not know model type {raw['model_type']!r}, and code from a "
            f"model folder is never run.{hint}"
        )
    if of_adapter := sorted(found.name for found in folder.glob("adapter_*") if found.suffix in _OF_ADAPTERS):
        raise UserError(
            f"model {path!r} holds an adapter beside its config.json ({of_adapter[0]}), which would not be read here, "
            "and which transformers reads instead; move the adapter's files to a folder of their own, for "
            "adapt.start_from or moetune adapter merge, or remove what a merge left"
        )
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types of errors for an invalid config.json
        dtype = "; dtype (torch_dtype) is bfloat16, float16 or float32" if "module 'torch' has no" in str(error) else ""
        raise UserError(f"model {path!r}: config.json is not valid: {one_line(error)}{dtype}") from None
    if ignored := next(_ignored(raw, config), None):
        raise UserError(f"model {path!r}: config.json {ignored}")
    return _with_settings_beside(config, folder)


def _ignored(raw: dict[str, Any], config: PretrainedConfig) -> Iterator[str]:
    """Yield what a config.json says and transformers does not take, because another key says something else: numbers
    under two names of one setting (`num_experts` and `n_routed_experts`), and rotary embeddings by keys of transformers
    5 and of before."""
    for section, part in ((raw, config), *((raw.get(key), getattr(config, key, None)) for key in config.sub_configs)):
        if not isinstance(section, dict) or part is None:
            continue
        settings = part.to_dict()
        for key, value in section.items():
            taken = settings.get(part.attribute_map.get(key, key))
            numbers = isinstance(value, int | float) and isinstance(taken, int | float)
            known = {*part.__dataclass_fields__, *part.attribute_map, *part.attribute_map.values()}
            near = () if key in known else get_close_matches(key, known - section.keys(), 1, _NEARLY)
            if near and isinstance(value, int | float) and value != getattr(part, near[0]):
                yield f"says {key}: {shown(value)}, which {part.model_type!r} does not have; correct it to {near[0]}"
            if numbers and value not in (taken, -1) and key not in _DERIVED:  # -1 asks for what the type computes
                yield f"says {key}: {shown(value)}, and transformers takes {shown(taken)}, by another key; remove one"
        ropes = getattr(part, "rope_parameters", None) or {}
        of_names: dict[str, Any] = {"": {"rope_theta": section.get("rope_theta")}}
        of_names |= {f"{name}.": section.get(name) for name in ("rope_parameters", "rope_scaling")}
        for name, said in of_names.items():
            for key, value in said.items() if isinstance(said, dict) else ():
                # numbers only: a class may have a type of its own, and a section for a kind of layer is filled in
                if isinstance(value, int | float | list) and ropes.get(key, value) != value:
                    yield (
                        f"says {name}{key}: {shown(value)}, and transformers takes {shown(ropes[key])}; say one thing, "
                        "in rope_parameters"
                    )


def _with_settings_beside(config: PretrainedConfig, folder: Path) -> PretrainedConfig:
    if not any(sections_with_settings(config)) and (beside := settings_beside(folder)):
        config.quantization_config = beside
    return config


def _layers_in(raw: Any) -> Iterator[int]:
    """Yield every number of layers in a config, nested sections included.

    They are checked first, because to build very many layers would take hours, even on the meta device.
    """
    for key, value in raw.items() if isinstance(raw, dict) else ():
        yield from _layers_in(value)
        if isinstance(value, int) and re.search(r"layers?$", key):
            yield value


def _config_from_hub(path: str) -> PretrainedConfig:
    """Read a model's configuration from the local hub cache or the network; `UserError` if neither has a valid one."""
    reachable = hub_is_reachable()
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=not reachable, trust_remote_code=False)
        beside = snapshot_download(path, allow_patterns=[*SETTINGS_BESIDE], local_files_only=not reachable)
    except Exception as error:  # no network, no such repository, no access, invalid config or remote code
        entries = map(find_model, model_names())
        hint = suggest(path, [entry.hub_id for entry in entries if entry is not None and entry.hub_id is not None])
        why = one_line(error) if reachable else UNREACHABLE
        raise UserError(
            f"model {path!r}: no such folder, and the hub did not give its configuration: {why}{hint} "
            f"{how_to_get(path)}"
        ) from None
    return _with_settings_beside(config, Path(beside))
