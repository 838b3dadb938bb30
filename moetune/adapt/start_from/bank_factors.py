"""The LoRA factors of expert banks, as adapters on disk refer to them: which layers have any, and their parts."""

from __future__ import annotations

from moetune.adapt.build import Adapted
from moetune.experts.bank import ExpertLora
from moetune.models.structure import MoeLayer


def lora_layers(adapted: Adapted) -> list[MoeLayer]:
    """Return the layers that have LoRA on experts."""
    return [layer for layer in adapted.structure.moe_layers if layer.index in adapted.selection.lora_experts]


def lora_of(adapted: Adapted, layer: MoeLayer) -> ExpertLora:
    """Return the LoRA factors in a layer's expert bank."""
    lora = adapted.model.get_submodule(f"{layer.experts}.lora")
    assert isinstance(lora, ExpertLora)
    return lora


def rows_of_parts(lora: ExpertLora, projection: str) -> tuple[slice, ...]:
    """Return the output rows of each part of a projection: gate and up if their factors are separate, else all."""
    return lora.gate_up_rows if projection == "gate_up" else (slice(None),)
