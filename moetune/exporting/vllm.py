"""LoRA out to an adapter folder that vLLM serves (`vllm serve BASE --enable-lora --lora-modules NAME=DIR`).

Unlike PEFT's, its layout of experts' factors follows the base checkpoint (vllm/lora/model_manager.py):

    experts apart     <experts>.<e>.<w1, gate_proj, …>.lora_A [r, in] and lora_B [out, r]; of a layer every expert with
                      every projection, or none (`pack_moe`)
    experts stacked   <experts>.base_layer.lora_A [E·r, H] and lora_B [2I, r·E] of gate and up,
                      <experts>.lora_A [E·r, I] and lora_B [H, r·E] of down, both there; A with the expert
                      slowest, B with it fastest (`_stack_moe_lora_weights`)

Everything is multiplied with one lora_alpha / r, so all factors have one rank: where one is lower, or an expert has
none, zeros fill it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig as PeftLoraConfig
from safetensors.torch import load_file
from torch import Tensor

from moetune.adapt.start_from.peft_layout import (
    PREFIX,
    WEIGHTS_FILE,
    join_experts,
    lora_layers,
    lora_of,
    lora_stacks,
    plain_number,
    rows_of_parts,
    split_experts,
)
from moetune.adapt.weights.target import out_in
from moetune.errors import UserError
from moetune.experts.bank import ExpertLora
from moetune.exporting.finished_run import FinishedRun, base_folder, confirmed_base
from moetune.exporting.folder import Exported
from moetune.exporting.peft import write_adapter
from moetune.models.hub.fingerprint import headers, take_fingerprint
from moetune.models.hub.names import KeyMapping, key_mappings
from moetune.models.hub.quantized import weights_of
from moetune.models.structure import MoeLayer
from moetune.run.names import linear_factors

Factors = tuple[Tensor, Tensor]
"""A [r, in] and B [out, r]."""


@dataclass(frozen=True)
class Layout:
    """What vLLM expects of one layer's experts.

    Attributes:
        module: the experts, by the checkpoint's name.
        projections: names of gate, up and down of one expert; empty where experts are stacked.
        hidden, intermediate, rows: features; `rows` those of gate and up together.
    """

    module: str
    experts: int
    projections: tuple[str, ...]
    hidden: int
    intermediate: int
    rows: int


def export_vllm(run: FinishedRun, out: Path) -> Exported:
    """Writes a run's factors into the empty folder `out`, and reads them as vLLM would.

    Raises:
        UserError: the run has no LoRA or trains more than that, or the base is gone or has no names for it.
    """
    adapted, lora = run.adapted, run.config.adapt.lora
    if lora is None:
        raise UserError(f"{run} has no adapt.lora, so there is no adapter; use --format merged")
    if adapted.selection.full or adapted.selection.experts:
        what = min(adapted.selection.full) if adapted.selection.full else "whole experts"
        raise UserError(f"{run} trains {what} beside LoRA, and vLLM's adapters hold factors only; use --format merged")
    folder = base_folder(run)
    confirmed_base(run, folder, take_fingerprint(folder))
    homes = key_mappings(adapted.run.model.plain, weights_of(headers(folder)))
    trained = {name: stored.rows().float() for name, stored in run.trained.items()}
    tensors: dict[str, Factors] = {}
    linears: dict[str, tuple[int, int]] = {}
    layouts = []
    rank = lora.rank
    for layer in lora_layers(adapted):
        homes_of_layer = [_home(homes, f"{layer.experts}.{stack}") for stack in lora_stacks(layer)]
        bank = lora_of(adapted, layer)
        factors = {projection: _of_experts(layer, bank, projection, trained) for projection in ("gate_up", "down")}
        if homes_of_layer[0].has_experts_apart:
            names = _names(layer, *homes_of_layer)
            layouts.append(
                _layout(layer, names[0][0].rpartition(".0.")[0], tuple(n.rpartition(".")[2] for n in names[0]))
            )
            for expert, of_expert in enumerate(names):
                tensors |= zip(of_expert, _apart(layer, bank, factors, expert), strict=True)
        else:
            module = homes_of_layer[0].every_key()[0].rpartition(".")[0]
            layouts.append(_layout(layer, module, ()))
            rank = max(rank, factors["gate_up"][0].shape[1])
            tensors |= {f"{module}.base_layer": factors["gate_up"], module: factors["down"]}
    for path in adapted.selection.lora_linears:
        name = _home(homes, f"{path}.weight").every_key()[0].removesuffix(".weight")
        A, B = (trained[factor] for factor in linear_factors(path).values())
        tensors[name], linears[name] = (A, B), (A.shape[1], B.shape[0])
    named: dict[str, Tensor] = {}
    for name, pair in tensors.items():
        A, B = _stacked(*_padded(*pair, rank)) if pair[0].ndim == 3 else _padded(*pair, rank)
        named |= {f"{PREFIX}{name}.lora_A.weight": A, f"{PREFIX}{name}.lora_B.weight": B}
    named = {name: tensor.contiguous().clone() for name, tensor in named.items()}
    settings = PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=plain_number(lora.scale * rank),
        target_modules=sorted({name.removesuffix(".base_layer").rpartition(".")[2] for name in tensors}),
        inference_mode=True,
    ).to_dict()
    settings |= {"target_modules": sorted(settings["target_modules"]), "base_model_name_or_path": str(folder)}
    write_adapter(out, named, settings)
    check_vllm(out, layouts, linears, rank)
    return Exported("vllm", run.step, len(named), sum(tensor.nbytes for tensor in named.values()))


def check_vllm(
    folder: Path, layouts: list[Layout], linears: Mapping[str, tuple[int, int]], rank: int
) -> dict[str, list[Factors]]:
    """Reads an adapter's keys and shapes as vLLM's `LoRAModelManager` does.

    Returns:
        module -> its factors; of experts gate, up and down of each expert in turn, or gate-and-up and down of each.

    Raises:
        UserError: vLLM would refuse it, or leave something of it out.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(folder / WEIGHTS_FILE).items():
        module, _, factor = key.removeprefix(PREFIX).removesuffix(".weight").rpartition(".lora_")
        if not key.startswith(PREFIX) or factor not in ("A", "B") or not module:
            raise UserError(f"vLLM would not know the key {key}")
        found.setdefault(module, {})[factor] = tensor
    read: dict[str, list[Factors]] = {}

    def take(module: str, into: int, outputs: int, experts: int = 1) -> Factors:
        factors = found.pop(module, {})
        A, B = factors.get("A"), factors.get("B")
        if A is None or B is None:
            raise UserError(f"vLLM needs both factors of {module}")
        if (*A.shape, *B.shape) != (experts * rank, into, outputs, rank * experts):
            raise UserError(f"vLLM would not read {module}: lora_A {[*A.shape]} and lora_B {[*B.shape]}")
        return A, B

    for name, (into, outputs) in linears.items():
        read[name] = [take(name, into, outputs)]
    for one in layouts:
        if one.projections:
            half = one.rows // max(len(one.projections) - 1, 1)
            sizes = [(one.hidden, half)] * (len(one.projections) - 1) + [(one.intermediate, one.hidden)]
            read[one.module] = [
                take(f"{one.module}.{expert}.{name}", *size)
                for expert in range(one.experts)
                for name, size in zip(one.projections, sizes, strict=True)
            ]
            continue
        stacked = (
            take(f"{one.module}.base_layer", one.hidden, one.rows, one.experts),
            take(one.module, one.intermediate, one.hidden, one.experts),
        )
        read[one.module] = [
            (A.reshape(one.experts, rank, -1)[expert], B.reshape(len(B), rank, one.experts)[:, :, expert])
            for expert in range(one.experts)
            for A, B in stacked
        ]
    if found:
        raise UserError(f"vLLM would not know {min(found)}")
    return read


def _home(homes: Mapping[str, KeyMapping], parameter: str) -> KeyMapping:
    home = homes.get(parameter)
    if home is None or (home.conversion is not None and not home.has_experts_apart):
        raise UserError(f"the base checkpoint has no name for {parameter} that vLLM could know; use --format merged")
    return home


def _layout(layer: MoeLayer, module: str, projections: tuple[str, ...]) -> Layout:
    shape = layer.shape
    rows = shape.intermediate * (2 if shape.has_gate else 1)
    return Layout(module, shape.num_experts, projections, shape.hidden, shape.intermediate, rows)


def _names(layer: MoeLayer, gate_up: KeyMapping, down: KeyMapping) -> list[list[str]]:
    """Of each expert its projections in the checkpoint: gate, up, down. Which is the gate, a marked tensor tells."""
    marked = torch.zeros(1, *gate_up.model.get_parameter(gate_up.parameter).shape[1:])
    if layer.shape.has_gate:
        out_in(layer, "gate_up_proj", marked[0])[_gate_and_up(layer)[0]] = 1
    names = []
    for expert in range(layer.shape.num_experts):
        marks = gate_up.of_expert(expert).to_checkpoint(marked)
        keys = [*sorted(marks, key=lambda key: not marks[key].any()), *down.of_expert(expert).every_key()]
        names.append([key.removesuffix(".weight") for key in keys])
    return names


def _gate_and_up(layer: MoeLayer) -> tuple[slice, slice]:
    half = layer.shape.intermediate
    return (
        (slice(0, half), slice(half, None)) if layer.shape.is_concatenated else (slice(0, None, 2), slice(1, None, 2))
    )


def _of_experts(layer: MoeLayer, bank: ExpertLora, projection: str, trained: Mapping[str, Tensor]) -> Factors:
    """A [E, R, in] and B [E, out, R] of all experts of a layer; zeros for those that have none."""
    A, B = (
        torch.stack([trained[f"{layer.experts}.lora.{projection}_{factor}.{expert}"] for expert in bank.slots])
        for factor in "AB"
    )
    experts = layer.shape.num_experts
    lora_A, lora_B = join_experts(A, B, bank.slots, experts, rows_of_parts(bank, projection))
    return split_experts(lora_A, lora_B, experts)


def _apart(layer: MoeLayer, bank: ExpertLora, factors: Mapping[str, Factors], expert: int) -> Iterator[Factors]:
    """Gate, up and down of one expert. A factor that gate and up share is there twice."""
    A, B = (tensor[expert] for tensor in factors["gate_up"])
    if not layer.shape.has_gate:
        yield A, B
    else:
        parts = len(bank.gate_up_rows)
        rank = len(A) // parts
        for part, rows in enumerate(_gate_and_up(layer)):
            own = slice(part * rank, (part + 1) * rank) if parts == 2 else slice(None)
            yield A[own], B[rows, own]
    yield factors["down"][0][expert], factors["down"][1][expert]


def _padded(A: Tensor, B: Tensor, rank: int) -> Factors:
    """The same factors at a higher rank, zeros behind: A [..., r, in] and B [..., out, r]."""
    more = rank - A.shape[-2]
    return torch.nn.functional.pad(A, (0, 0, 0, more)), torch.nn.functional.pad(B, (0, more))


def _stacked(A: Tensor, B: Tensor) -> Factors:
    """A [E, r, in] and B [E, out, r] as one pair: the expert slowest in A, fastest in B."""
    return A.flatten(0, 1), B.permute(1, 2, 0).flatten(1)
