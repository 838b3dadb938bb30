"""`LoraRank`, the type of `adapt.lora.rank`: one rank, or ranks by target and layers."""

from typing import Annotated

from pydantic import BeforeValidator, Discriminator, Tag

from moetune.config.fields import Size, layer_range

LoraRanks = dict[str, int | dict[str, int]]
"""Target or layers (`0-5`) -> rank, or target -> layers -> rank."""


def _check_ranks(value: object) -> object:
    """Check ranks by target or layers: return a mapping with its keys as text, and anything else unchanged.

    Raises:
        ValueError: a mapping is empty, mixes names with layers, has a mapping below layers, or names a layer twice.
    """
    if not isinstance(value, dict):
        return value
    ranks = {str(key): _check_ranks(rank) for key, rank in value.items()}
    layers = {key: numbers for key in ranks if (numbers := layer_range(key)) is not None}
    if not ranks or 0 < len(layers) < len(ranks) or any(isinstance(ranks[key], dict) for key in layers):
        raise ValueError(
            "write ranks by target, {attention: 64, experts: 8}, by layers, {0-5: 8, 6-31: 16}, or by layers of a "
            "target, {attention: 64, experts: {0-5: 8, 6-31: 16}}"
        )
    seen: set[int] = set()
    for numbers in layers.values():
        if twice := seen.intersection(numbers):
            raise ValueError(f"layer {min(twice)} has two ranks")
        seen.update(numbers)
    return ranks


_which = Discriminator(lambda raw: "several" if isinstance(raw, dict) else "one")
_OfTarget = Annotated[Annotated[Size, Tag("one")] | Annotated[dict[str, Size], Tag("several")], _which]
LoraRank = Annotated[
    Annotated[Size, Tag("one")] | Annotated[dict[str, _OfTarget], Tag("several")], _which, BeforeValidator(_check_ranks)
]


def is_by_target(ranks: int | LoraRanks) -> bool:
    """Return whether `ranks` maps targets to ranks; False for layers -> rank, and for a single rank."""
    return isinstance(ranks, dict) and layer_range(next(iter(ranks))) is None


def rank_of(ranks: int | LoraRanks, target: str, layer: int | None) -> int | None:
    """Return the rank of a layer's factors; None if `ranks` does not name the layer.

    Args:
        target: the entry of `adapt.lora.targets` that the factors are for.
        layer: index of the decoder layer; None outside of the layers.
    """
    of_target = ranks[target] if isinstance(ranks, dict) and is_by_target(ranks) else ranks
    if isinstance(of_target, int):
        return of_target
    for key, rank in of_target.items():
        if isinstance(rank, int) and layer is not None and layer in (layer_range(key) or ()):
            return rank
    return None


def layers_named(ranks: int | LoraRanks) -> set[int]:
    """Return the indices of all layers that the keys of `ranks` name, at either level; empty for a single rank."""
    inside = ranks.items() if isinstance(ranks, dict) else ()
    return {layer for key, rank in inside for layer in layer_range(key) or layers_named(rank)}  # type: ignore[arg-type]


def ranks_as_text(ranks: int | LoraRanks) -> str:
    """Format ranks as text: `16`, or `64 (attention), 8 (experts)`, or for layers of a target `8 (experts 0-5)`."""
    if isinstance(ranks, int):
        return str(ranks)
    parts = []
    for key, rank in ranks.items():
        inside = {key: rank} if isinstance(rank, int) else {f"{key} {layers}": value for layers, value in rank.items()}
        parts += [f"{value} ({where})" for where, value in inside.items()]
    return ", ".join(parts)
