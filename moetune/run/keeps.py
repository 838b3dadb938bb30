"""What each decoder layer keeps for backward, by `train.checkpointing` and `train.keep_rows`.

One more thing that a layer may keep is a value of `Keepable`, a key of the schema's `KeptConfig`, where it is kept
(adapt/checkpointing.py), and its place among the choices of `auto` (planning/settle.py). Traces tell layers apart by
it.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

from moetune.config.fields import ranges
from moetune.config.schema import KeptConfig, TrainConfig
from moetune.models.structure import ModelStructure

Keepable = Literal["attention", "rows", "rest", "host"]
"""The outputs of attention's kernels; `rows`, the experts' outputs of gate_up, one for each routed token; everything
but rows; `host`: nothing on the GPU, because the layer's input waits in host memory."""
Kept = frozenset[Keepable]
"""What a layer keeps beside its input. With `rest` the layer is not recomputed, so `attention` adds nothing."""
NOTHING: Kept = frozenset()


def recomputes_layers(train: TrainConfig) -> bool:
    """Return whether decoder layers are recomputed in backward, all or some of them."""
    return train.checkpointing not in ("none", "experts_only")


def is_open(train: TrainConfig) -> bool:
    """Return whether what layers keep depends on the GPU: `auto` as `checkpointing`, `checkpointing.host` or
    `keep_rows`."""
    return "auto" in (train.checkpointing, train.keep_rows, getattr(train.checkpointing, "host", ""))


def kept_by_layer(train: TrainConfig, structure: ModelStructure) -> dict[int, Kept]:
    """Return index of a decoder layer -> what it keeps; layers that keep only their input are left out.

    A layer keeps a set of `Keepable`.

    `train.keep_rows: N` stands for the last N layers with experts: they are the first in backward, so their rows are
    freed before other layers are recomputed. `auto` keeps nothing until the GPU is known (planning/settle.py), and as
    `checkpointing.host` no input. Layers that do not exist are left out; `unknown_layers` reports them.
    """
    of_experts = [layer.index for layer in structure.moe_layers]
    layers: dict[Keepable, list[int]] = {"attention": [], "rows": [], "rest": [], "host": []}
    if isinstance(train.checkpointing, KeptConfig):
        known = {"rows": of_experts}
        for name in layers:
            ids, every = getattr(train.checkpointing, name), known.get(name, list(range(structure.num_layers)))
            own = ids if isinstance(ids, tuple) else ()
            layers[name] = every if ids == "all" else [layer for layer in every if layer in own]
        if train.checkpointing.host == "auto":
            layers["host"] = [layer for layer in range(structure.num_layers) if layer not in layers["rest"]]
    elif train.checkpointing == "offload":
        layers["host"] = list(range(structure.num_layers))
    elif not recomputes_layers(train):
        layers["rest"] = list(range(structure.num_layers))
        layers["rows"] = of_experts if train.checkpointing == "none" else []
    if isinstance(train.keep_rows, int):
        layers["rows"] = layers["rows"] or of_experts[-train.keep_rows :]
    every = sorted({layer for numbers in layers.values() for layer in numbers})
    return {layer: frozenset(name for name, numbers in layers.items() if layer in numbers) for layer in every}


def unknown_layers(train: TrainConfig, structure: ModelStructure) -> Iterator[str]:
    """Yield a message for each list of `train.checkpointing` with a layer that does not exist, or, in the list `rows`,
    has no experts."""
    if not isinstance(train.checkpointing, KeptConfig):
        return
    of_experts = [layer.index for layer in structure.moe_layers]
    for name in KeptConfig.model_fields:
        every, what = (of_experts, "layers with experts") if name == "rows" else (range(structure.num_layers), "layers")
        ids = getattr(train.checkpointing, name)
        wrong = [layer for layer in ids if layer not in every] if isinstance(ids, tuple) else []
        if wrong:
            has = f"the {what} {ranges(every)}" if every else f"no {what}"
            yield f"train.checkpointing.{name}: {ranges(wrong)}, and {structure.model_type!r} has {has}"
    kept = kept_by_layer(train, structure).items()
    if in_both := [layer for layer, keeps in kept if {"rest", "host"} <= keeps]:
        yield f"train.checkpointing.host: {ranges(in_both)}, and layers in rest keep their input; name each in one list"


def section_of(keeps: Mapping[int, Kept]) -> KeptConfig | Literal["full"]:
    """Return the value of `train.checkpointing` with which `kept_by_layer` returns `keeps`; `full` if that is empty."""
    lists = {
        name: tuple(sorted(layer for layer, kept in keeps.items() if name in kept)) for name in KeptConfig.model_fields
    }
    return KeptConfig(**{name: layers for name, layers in lists.items() if layers}) if any(lists.values()) else "full"
