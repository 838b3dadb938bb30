"""Known models as data files: read without torch, without transformers and without a network.

Each `models/<name>.json` holds a model's `config.json` and its published parameter count with the source of
that count. `docs/reference/catalog.md` lists the models and describes the format.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent
_MODELS = _ROOT / "models"


@dataclass(frozen=True)
class CatalogModel:
    """One entry of the catalog.

    Attributes:
        name: The catalog name, lower case, such as `mixtral-8x7b`.
        hub_id: The model's repository on the Hugging Face hub; None if it has none.
        license: The license of the weights.
        config: The model's `config.json`. Build it with
            `AutoConfig.for_model(config["model_type"], **the_other_keys)`.
        published: `total`, the exact parameter count as an int, and `source`, where that figure is from.
            Optional: `note`; `buffers`, elements that `total` counts though they are buffers in transformers,
            by buffer name; `hub_metadata`, a larger `total` that the hub displays, with the parts that
            transformers does not build in `not_built`.
        folder: A local folder with config, tokenizer and weights as a hub repository has them; None if the
            weights are not shipped.
    """

    name: str
    hub_id: str | None
    license: str
    config: dict[str, Any]
    published: dict[str, Any]
    folder: Path | None


def model_names() -> list[str]:
    """Return the names of all models in the catalog, sorted."""
    return sorted(path.stem for path in _MODELS.glob("*.json"))


def find_model(name: str) -> CatalogModel | None:
    """Look a model up by its catalog name or its hub id; case does not matter.

    Args:
        name: For example `mixtral-8x7b` or `mistralai/Mixtral-8x7B-v0.1`.

    Returns:
        The model, or None if the catalog does not have it.
    """
    wanted = name.lower()
    names = model_names()
    if wanted in names:
        return _read(wanted)
    models = map(_read, names)
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
    data = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(data, dict), f"{path} does not hold a JSON object"
    return data
