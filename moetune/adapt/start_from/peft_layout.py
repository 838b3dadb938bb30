"""How a PEFT adapter lies on disk: what writing one (exporting/peft.py) and reading one (peft_adapter.py) share.

PEFT 0.21 holds the factors of a stack of E experts (its `target_parameters`) in two matrices:

    lora_A [E·R, in]    expert after expert
    lora_B [out, R·E]   reads back as .reshape(out, R, E).permute(2, 0, 1)

and wraps the experts module once a stack, in the order of its parameters: gate_up is inside
(`experts.base_layer.lora_A`), down outside (`experts.lora_A`). Both are [in] to [out] whatever the model stores. An
expert without factors has zeros. A split gate and up of rank r are one A of rank R = 2r, both A joined, and a B whose
gate rows use the first r columns and whose up rows the others.

What trains in full precision is in `modules_to_save`, module by module, which is how PEFT saves such parameters.
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
    """Factors of n experts as PEFT holds those of all E.

    Args:
        A, B: [n, parts, r, in] and [n, parts, out / parts, r].
        ids: the n experts.
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
    """The factors of each expert: A [E, R, in] and B [E, out, R]."""
    outputs = lora_B.shape[0]
    return lora_A.unflatten(0, (experts, -1)), lora_B.reshape(outputs, -1, experts).permute(2, 0, 1)


def split_parts(B: Tensor, rank: int, rows: tuple[slice, ...]) -> tuple[Tensor, bool]:
    """B [n, out, parts·r] taken apart: [n, parts, out / parts, r], and whether anything was outside these blocks."""
    blocks, rest = [], B.clone()
    for part, of_part in enumerate(rows):
        columns = slice(part * rank, (part + 1) * rank)
        blocks.append(B[:, of_part, columns])
        rest[:, of_part, columns] = 0
    return torch.stack(blocks, 1), bool(rest.any())


def plain_number(number: float) -> Any:
    return int(number) if number == int(number) else number


def lora_layers(adapted: Adapted) -> list[MoeLayer]:
    return [layer for layer in adapted.structure.moe_layers if layer.index in adapted.selection.lora_experts]


def lora_of(adapted: Adapted, layer: MoeLayer) -> ExpertLora:
    lora = adapted.model.get_submodule(f"{layer.experts}.lora")
    assert isinstance(lora, ExpertLora)
    return lora


def lora_stacks(layer: MoeLayer) -> tuple[str, str]:
    return ("gate_up_proj" if layer.shape.has_gate else "up_proj"), "down_proj"


def expert_keys(layer: MoeLayer) -> dict[str, str]:
    """The bank's name of a projection -> where PEFT has its factors."""
    return {"gate_up": f"{layer.experts}.base_layer", "down": layer.experts}


def rows_of_parts(lora: ExpertLora, projection: str) -> tuple[slice, ...]:
    return lora.gate_up_rows if projection == "gate_up" else (slice(None),)
