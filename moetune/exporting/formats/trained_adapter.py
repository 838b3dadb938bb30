"""`trained_adapter`: what a run trained with LoRA, as an `Adapter`, from which every adapter format is written."""

from collections.abc import Mapping

import torch
from torch import Tensor

from moetune.adapt.build import Adapted
from moetune.adapters.factors import DOWN, GATE_UP, Adapter, Factors, join_experts
from moetune.config.schema import LoraConfig
from moetune.experts.bank import ExpertLora
from moetune.models.moe import MoeLayer
from moetune.run.names import linear_factors


def trained_adapter(
    adapted: Adapted, lora: LoraConfig, trained: Mapping[str, Tensor], saved: Mapping[str, Tensor] | None = None
) -> Adapter:
    """Return the LoRA factors of a run, with zeros for experts without LoRA.

    Args:
        lora: the LoRA settings of the run.
        trained: the trained tensors, by their names in a training checkpoint.
        saved: the parameters that the adapter shall hold whole, by name; None for none.
    """
    ranks = adapted.selection.ranks
    linears = {}
    for path in adapted.selection.lora_linears:
        A, B = (trained[name] for name in linear_factors(path).values())
        linears[path] = Factors(A, B, lora.scale(ranks[path]))
    experts = {
        layer.experts: {projection: _of_experts(layer, of_layer, projection, trained) for projection in (GATE_UP, DOWN)}
        for layer, of_layer in adapted.expert_lora()
    }
    return Adapter(linears, experts, saved=saved or {})


def _of_experts(layer: MoeLayer, lora: ExpertLora, projection: str, trained: Mapping[str, Tensor]) -> Factors:
    """Return the factors of all experts of a layer for a projection, `gate_up` or `down`.

    If gate and up have separate factors of rank r, they are joined to factors of rank 2r (`join_experts`).
    """
    names = (f"{layer.experts}.lora.{projection}_{factor}" for factor in "AB")
    A, B = (torch.stack([trained[f"{name}.{expert}"] for expert in lora.slots]) for name in names)
    A, B = join_experts(A, B, lora.slots, layer.shape.num_experts, lora.rows_of_parts[projection])
    return Factors(A, B, lora.scale)
