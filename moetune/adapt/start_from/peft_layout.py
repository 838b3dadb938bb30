"""Layout of a PEFT adapter on disk: names and shapes of LoRA factors, for reading and for export.

exporting/peft.py writes this layout, peft_adapter.py reads it. PEFT 0.21 stores the factors of E experts with R ranks
each (its `target_parameters`) in two matrices:

    lora_A [E·R, in]    expert after expert
    lora_B [out, R·E]   becomes [E, out, R] by .reshape(out, R, E).permute(2, 0, 1)

PEFT wraps the experts module once for each of its stacks, in the order of the parameters: the factors of gate_up are in
the inner wrapper (`experts.base_layer.lora_A`), those of down in the outer (`experts.lora_A`). Both map [in] to [out],
however the model stores its weights. An expert without LoRA has zeros. If gate and up have separate factors of rank r,
they are stored as one A of rank R = 2r, the two A joined, and one B whose gate rows use the first r columns and whose
up rows use the others.

Parameters that train in full precision are stored as PEFT stores `modules_to_save`, module by module.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from moetune.adapt.build import Adapted
from moetune.experts.bank import ExpertLora
from moetune.models.structure import MoeLayer

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."


def join_experts(A: Tensor, B: Tensor, ids: Iterable[int], experts: int, rows: tuple[slice, ...]) -> tuple[Tensor, ...]:
    """Combine the factors of n experts into PEFT's two matrices for all E experts of a layer, with zeros for the
    others.

    Args:
        A: [n, parts, r, in], where parts is 2 if gate and up have separate factors, else 1.
        B: [n, parts, out / parts, r].
        ids: ids of the n experts.
        experts: E.
        rows: the output rows of each part.

    Returns:
        lora_A [E·R, in] and lora_B [out, R·E], where R = parts·r.
    """
    chosen = list(ids)
    _, parts, rank, into = A.shape
    outputs = parts * B.shape[2]
    A_all = A.new_zeros(experts, parts * rank, into)
    A_all[chosen] = A.flatten(1, 2)
    B_all = B.new_zeros(experts, outputs, parts * rank)
    for part, of_part in enumerate(rows):
        B_all[chosen, of_part, part * rank : (part + 1) * rank] = B[:, part]
    return A_all.flatten(0, 1), B_all.permute(1, 2, 0).reshape(outputs, -1)


def split_experts(lora_A: Tensor, lora_B: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the factors of each of E experts, A [E, R, in] and B [E, out, R], as views where possible of PEFT's
    matrices `lora_A` [E·R, in] and `lora_B` [out, R·E]."""
    outputs = lora_B.shape[0]
    return lora_A.unflatten(0, (experts, -1)), lora_B.reshape(outputs, -1, experts).permute(2, 0, 1)


def split_parts(B: Tensor, rank: int, rows: tuple[slice, ...]) -> tuple[Tensor, bool]:
    """Split the B factors [n, out, parts·r] of joined parts, such as gate and up, into those of each part.

    Args:
        rank: r, the rank of a part.
        rows: the output rows of each part.

    Returns:
        The B factors [n, parts, out / parts, r], and whether B has nonzero values outside of them, which means that the
            parts share their factors.
    """
    blocks, rest = [], B.clone()
    for part, of_part in enumerate(rows):
        columns = slice(part * rank, (part + 1) * rank)
        blocks.append(B[:, of_part, columns])
        rest[:, of_part, columns] = 0
    return torch.stack(blocks, 1), bool(rest.any())


def plain_number(number: float) -> Any:
    """Return a whole number as an int, any other as it is."""
    return int(number) if number == int(number) else number


def lora_layers(adapted: Adapted) -> list[MoeLayer]:
    """Return the layers that have LoRA on experts."""
    return [layer for layer in adapted.structure.moe_layers if layer.index in adapted.selection.lora_experts]


def lora_of(adapted: Adapted, layer: MoeLayer) -> ExpertLora:
    """Return the LoRA factors in a layer's expert bank."""
    lora = adapted.model.get_submodule(f"{layer.experts}.lora")
    assert isinstance(lora, ExpertLora)
    return lora


def lora_stacks(layer: MoeLayer) -> tuple[str, str]:
    """Return transformers' names of the two parameters with a layer's expert weights."""
    return ("gate_up_proj" if layer.shape.has_gate else "up_proj"), "down_proj"


def expert_keys(layer: MoeLayer) -> dict[str, str]:
    """Return the projection's name in the bank (`gate_up`, `down`) -> the path at which PEFT stores its factors."""
    return {"gate_up": f"{layer.experts}.base_layer", "down": layer.experts}


def rows_of_parts(lora: ExpertLora, projection: str) -> tuple[slice, ...]:
    """Return the output rows of each part of a projection: gate and up if their factors are separate, else all."""
    return lora.gate_up_rows if projection == "gate_up" else (slice(None),)
