"""`model:` of a run file, and the formats that frozen weights are stored in."""

from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BeforeValidator, Field, Tag, ValidationError, field_serializer

from moetune.config.fields import FilePath, layer_range, ranges
from moetune.config.schema.section import WORD_OR_SECTION, Section
from moetune.errors import UserError, shown

Int4Name = Literal[
    "int4-g32", "int4-g64", "int4-g128", "int4-row", "int4-g32-order", "int4-g64-order", "int4-g128-order"
]
QuantizedDtype = Literal["nf4", "int8", "fp8", "fp8-row", "fp8-tensor", "mxfp8", "nvfp4", "mxfp4", Int4Name]
Storage = Literal[QuantizedDtype, "bf16", "fp32"]
Into = Literal["fp8", "mxfp8", "nvfp4", "mxfp4", "int4"]
"""A quantized format that a merged checkpoint is rounded to: `--into`, `train.merge_into`."""
BasePart = Literal["experts", "attention", "dense_mlp", "shared_experts"]
"""A component whose frozen matrices are stored in `model.base`."""
BASE_PARTS: tuple[BasePart, ...] = get_args(BasePart)


def _by_layer(raw: object) -> object:
    """Return a mapping from lists of layers, such as `0-2`, with a key for each layer, ascending; else `raw` itself.

    Raises `ValueError` for a key that names no layers, and for a layer that two of them name.
    """
    if not isinstance(raw, dict):
        return raw
    by_layer: dict[int, object] = {}
    for key, stored in raw.items():
        if (layers := layer_range(str(key))) is None:
            raise ValueError(f"{shown(key)} names no layers; write {{0-2: bf16, 27: {{experts: bf16}}}}")
        if twice := by_layer.keys() & set(layers):
            raise ValueError(f"layer {min(twice)} is written twice")
        by_layer |= dict.fromkeys(layers, stored)
    return dict(sorted(by_layer.items()))


_OfParts = dict[BasePart, Storage]
_OfLayer = Annotated[Annotated[Storage, Tag("word")] | Annotated[_OfParts, Tag("by layer")], WORD_OR_SECTION]


class BaseConfig(Section):
    """Storages of frozen weights by layer and by part (`model.base` as a section).

    Of several that name a matrix, the first counts of: a part of its layer, its layer, its part, the default.

    Attributes:
        default: storage of all that is not named below; `auto` as for `model.base`.
        parts: part -> its storage in all layers.
        layers: index of a decoder layer -> storage of the layer, or of some of its parts.
    """

    default: Literal["auto", Storage] = "auto"
    parts: _OfParts = Field(default_factory=dict)
    layers: Annotated[dict[int, _OfLayer], BeforeValidator(_by_layer)] = Field(default_factory=dict)

    @field_serializer("layers")
    def _in_ranges(self, layers: dict[int, Any]) -> dict[str, Any]:
        """Return the layers as a user writes them: those with equal storages under one key, such as `0-2`."""
        alike: dict[str, list[int]] = {}
        for layer, stored in layers.items():
            alike.setdefault(repr(stored), []).append(layer)
        return {ranges(same): layers[same[0]] for same in alike.values()}

    def named(self) -> dict[str, str]:
        """Return what is stored otherwise than the default, in words -> its storage."""
        words: dict[str, str] = {str(part): storage for part, storage in self.parts.items()}
        for layers, stored in self._in_ranges(self.layers).items():
            where = f"layer{'' if layers.isdecimal() else 's'} {layers}"
            words |= {where: stored} if isinstance(stored, str) else {f"{where}, {p}": s for p, s in stored.items()}
        return words

    def __str__(self) -> str:
        return "; ".join([self.default, *(f"{storage} ({where})" for where, storage in self.named().items())])


_Base = Annotated[
    Annotated[Literal["auto", Storage], Tag("word")] | Annotated[BaseConfig, Tag("by layer")], WORD_OR_SECTION
]


def storage_in(base: Any, part: str, layer: int | None) -> Storage:
    """Return in what a `model.base` without `auto` stores the frozen matrices of a part (`BasePart`) of a layer.

    `layer` is None for what is outside of the layers.
    """
    storage: Any = base
    if isinstance(base, BaseConfig):
        by_layer, by_part = dict[Any, Any](base.layers), dict[Any, Any](base.parts)
        storage = by_layer.get(layer, {})
        if not isinstance(storage, str):
            storage = storage.get(part) or by_part.get(part, base.default)
    return cast(Storage, storage)


class ModelConfig(Section):
    """The model, and how its frozen weights are stored (`model:`).

    Attributes:
        path: a catalog name, a local folder in hub format, or a hub id.
        weights: read the published weights, or draw random ones.
        base: precision in which frozen weights are stored; `auto` keeps the format of checkpoints in NF4, MXFP4,
            NVFP4, FP8 or INT4 and of quantized bases, and is nf4 for all others. A section names several.
        double_quant: with nf4, store the scales in 8 bits.
        dtype: dtype of compute and of trained weights; `auto` is bf16 on a GPU and fp32 on a CPU.
        attention: the attention implementation, by transformers' name; `auto` is sdpa if it computes the model's
            attention, else eager.
        experts_on: where quantized experts are kept: in GPU memory, or in pinned host memory.
        embeddings_on: where frozen embedding tables are kept; those that are tied to the LM head stay in GPU memory.
    """

    path: FilePath
    weights: Literal["pretrained", "random"] = "pretrained"
    base: _Base = "auto"
    double_quant: bool = True
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    experts_on: Literal["gpu", "host"] = "gpu"
    embeddings_on: Literal["gpu", "host"] = "gpu"

    @property
    def default_base(self) -> str:
        """`base`, or its default."""
        return self.base.default if isinstance(self.base, BaseConfig) else self.base

    @property
    def storages(self) -> frozenset[str]:
        """All values in `base`."""
        named = self.base.named().values() if isinstance(self.base, BaseConfig) else ()
        return frozenset((self.default_base, *named))

    @classmethod
    def named(cls, path: str, **settings: Any) -> "ModelConfig":
        """Return the configuration of a model that an option or an adapter names, with `settings` as other keys.

        Raises:
            UserError: `path` cannot be the name of a model.
        """
        try:
            return cls.model_validate({"path": path, **settings})
        except ValidationError as error:
            raise UserError(f"model {path!r}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
