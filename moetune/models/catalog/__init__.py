"""Catalog: known models' configurations and published parameter counts (JSON); figures of GPUs.

Nothing here needs torch, transformers or a network. Each file `models/<name>.json` holds a model's `config.json` and
its published parameter count with the source (docs/reference/catalog.md).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent
_MODELS = _ROOT / "models"


@dataclass(frozen=True)
class CatalogModel:
    """One model of the catalog.

    Attributes:
        name: name in lower case, such as `mixtral-8x7b`.
        hub_id: repository on the Hugging Face hub; None if the model is not published there.
        license: name of its license, such as `Apache-2.0`.
        config: contents of the model's `config.json`.
        published: `total`, the exact parameter count, and its `source`. Optional keys: `note`; `buffers`, buffer name
            -> number of elements that `total` counts and transformers keeps as buffers; `hub_metadata`, a larger
            `total` that the hub displays, with the parts in `not_built` that transformers does not build.
        folder: local folder with config, tokenizer and weights in hub format; None if the package has only the config.
    """

    name: str
    hub_id: str | None
    license: str
    config: dict[str, Any]
    published: dict[str, Any]
    folder: Path | None


def model_names() -> list[str]:
    """Return the names of all models, sorted."""
    return sorted(path.stem for path in _MODELS.glob("*.json"))


def find_model(name: str) -> CatalogModel | None:
    """Return a model by its catalog name or hub id, ignoring case; None if the catalog does not have it."""
    wanted = name.lower()
    if wanted in model_names():
        return _read(wanted)
    models = map(_read, model_names())
    return next((model for model in models if model.hub_id and model.hub_id.lower() == wanted), None)


def _read(name: str) -> CatalogModel:
    entry = _read_json(_MODELS / f"{name}.json")
    folder = _ROOT / entry["folder"] if "folder" in entry else None
    return CatalogModel(
        name=entry["name"],
        hub_id=entry.get("hub_id"),
        license=entry["license"],
        config=entry["config"] if folder is None else _read_json(folder / "config.json"),
        published=entry["published"],
        folder=folder,
    )


def _read_json(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data
