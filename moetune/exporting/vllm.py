"""`write_vllm`: export LoRA as an adapter for vLLM (`vllm serve BASE --enable-lora --lora-modules NAME=DIR`).

Unlike in a PEFT adapter, the layout of the experts' factors follows that of the experts in the base checkpoint
(vllm/lora/model_manager.py), for E experts, rank r, hidden size H and intermediate size I:

    a tensor per      <experts>.<e>.<w1, gate_proj, …>.lora_A [r, in] and lora_B [out, r]; a layer has all projections
    expert            of all experts, or none (`pack_moe`)
    experts stacked   <experts>.base_layer.lora_A [E·r, H] and lora_B [2I, r·E] of gate and up,
                      <experts>.lora_A [E·r, I] and lora_B [H, r·E] of down; the expert is the slowest index in A, the
                      fastest in B (`_stack_moe_lora_weights`)

One scale, lora_alpha / r, applies to all factors, so all have the same rank: factors of a lower rank, and experts
without factors, are padded with zeros; B of factors with another scale is multiplied by the ratio of the scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from peft import LoraConfig as PeftLoraConfig
from torch import Tensor

from moetune.adapt.start_from.peft_layout import lora_layers, lora_of, lora_stacks, plain_number, split_experts
from moetune.adapt.weights.target import out_in
from moetune.errors import UserError
from moetune.exporting.finished_run import FinishedRun, base_folder, confirmed_base
from moetune.exporting.folder import Written
from moetune.exporting.peft import joined_factors, write_adapter
from moetune.models.hub.dequantize import weights_of
from moetune.models.hub.fingerprint import headers
from moetune.models.hub.key_mapping import KeyMapping, key_mappings
from moetune.models.structure import MoeLayer
from moetune.run.names import linear_factors

Factors = tuple[Tensor, Tensor]
"""LoRA factors A [r, in] and B [out, r]; for all E experts of a layer A [E, r, in] and B [E, out, r]."""


def write_vllm(run: FinishedRun, out: Path) -> Written:
    """Write the LoRA factors of a run as an adapter for vLLM.

    Raises:
        UserError: the run has no LoRA, or also trains parameters in full precision; the base is missing or has changed;
            or the base checkpoint stores a parameter with LoRA in a form that vLLM has no name for.
    """
    adapted, lora = run.adapted, run.config.adapt.lora
    if lora is None:
        raise UserError(f"{run} has no adapt.lora, so there is no adapter; use --format merged")
    if adapted.selection.full or adapted.selection.experts:
        what = min(adapted.selection.full) if adapted.selection.full else "whole experts"
        raise UserError(f"{run} trains {what} beside LoRA, and vLLM's adapters hold factors only; use --format merged")
    folder = base_folder(run)
    confirmed_base(run, folder)
    mappings = key_mappings(adapted.run.model.plain, weights_of(headers(folder)))
    trained = {name: stored.rows().float() for name, stored in run.trained.items()}
    factors: dict[str, Factors] = {}
    ranks, scale = adapted.selection.ranks, lora.scale(min(adapted.selection.ranks.values()))

    def scaled(A: Tensor, B: Tensor, path: str) -> Factors:
        return A, B * (lora.scale(ranks[path]) / scale)

    for layer in lora_layers(adapted):
        gate_up, down = (_mapping(mappings, f"{layer.experts}.{stack}") for stack in lora_stacks(layer))
        of_gate_up, of_down = (
            split_experts(
                *scaled(*joined_factors(adapted, layer, projection, trained), layer.experts),
                experts=layer.shape.num_experts,
            )
            for projection in ("gate_up", "down")
        )
        if gate_up.has_experts_apart:
            parts = len(lora_of(adapted, layer).gate_up_rows)
            for expert, names in enumerate(_names(layer, gate_up, down)):
                fused, of_last = ((A[expert], B[expert]) for A, B in (of_gate_up, of_down))
                factors |= zip(names, [*_projections(layer, fused, parts), of_last], strict=True)
        else:
            module = gate_up.every_key()[0].rpartition(".")[0]
            factors |= {f"{module}.base_layer": of_gate_up, module: of_down}
    for path in adapted.selection.lora_linears:
        A, B = (trained[name] for name in linear_factors(path).values())
        factors[_mapping(mappings, f"{path}.weight").every_key()[0].removesuffix(".weight")] = scaled(A, B, path)
    rank = max(A.shape[-2] for A, _ in factors.values())
    tensors: dict[str, Tensor] = {}
    for name, (A, B) in factors.items():
        missing = rank - A.shape[-2]
        A, B = torch.nn.functional.pad(A, (0, 0, 0, missing)), torch.nn.functional.pad(B, (0, missing))
        if A.ndim == 3:
            A, B = A.flatten(0, 1), B.permute(1, 2, 0).flatten(1)
        tensors |= {f"{name}.lora_A.weight": A, f"{name}.lora_B.weight": B}
    settings = PeftLoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_alpha=plain_number(scale * rank), inference_mode=True
    ).to_dict()
    targets = {name.removesuffix(".base_layer").rpartition(".")[2] for name in factors}
    settings |= {"target_modules": sorted(targets), "base_model_name_or_path": str(folder)}
    return write_adapter(out, tensors, settings)


def _mapping(mappings: Mapping[str, KeyMapping], parameter: str) -> KeyMapping:
    """Return the mapping of a parameter to the checkpoint's tensors.

    Raise `UserError` if there is none, or if transformers does more with the tensors than stack those of experts or
    transpose them.
    """
    found = mappings.get(parameter)
    if found is None or not (found.has_experts_apart or found.only_transposes):
        raise UserError(f"the base checkpoint has no name for {parameter} that vLLM could know; use --format merged")
    return found


def _names(layer: MoeLayer, gate_up: KeyMapping, down: KeyMapping) -> Iterator[list[str]]:
    """Yield, for each expert, the checkpoint's names of its gate, up and down projections, in this order.

    To tell gate from up, a tensor with ones in the gate's rows and zeros in up's is converted to the checkpoint's
    layout.
    """
    marked = torch.zeros(1, *gate_up.model.get_parameter(gate_up.parameter).shape[1:])
    if layer.shape.has_gate:
        out_in(layer, "gate_up_proj", marked[0])[_gate_and_up(layer)[0]] = 1
    for expert in range(layer.shape.num_experts):
        marks = gate_up.of_expert(expert).to_checkpoint(marked)
        keys = [*sorted(marks, key=lambda key: not marks[key].any()), *down.of_expert(expert).every_key()]
        yield [key.removesuffix(".weight") for key in keys]


def _gate_and_up(layer: MoeLayer) -> tuple[slice, slice]:
    """Return the rows of gate and of up in the fused gate_up projection of a layer."""
    half = layer.shape.intermediate
    if layer.shape.is_concatenated:
        return slice(0, half), slice(half, None)
    return slice(0, None, 2), slice(1, None, 2)


def _projections(layer: MoeLayer, fused: Factors, parts: int) -> Iterator[Factors]:
    """Yield the factors of gate and of up, from one expert's factors of the fused projection.

    Args:
        fused: A [parts·r, in] and B [out, parts·r] of the expert.
        parts: 2 if gate and up have an A each; 1 if they share A, which is then yielded twice.
    """
    A, B = fused
    if not layer.shape.has_gate:
        yield A, B
        return
    rank = len(A) // parts
    for part, rows in enumerate(_gate_and_up(layer)):
        own = slice(part * rank, (part + 1) * rank) if parts == 2 else slice(None)
        yield A[own], B[rows, own]
