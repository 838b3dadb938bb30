"""What trains, by the names that it has in the adapted model, and which part of the run file each belongs to.

| part | what | name |
|---|---|---|
| router, other | a parameter of the plain model | its own; in a linear layer that PEFT wraps, below `base_layer` |
| experts | a matrix of one trained expert | `<experts>.trained.<id>.<gate_up or down>.<weight or bias>` |
| lora | PEFT's factors on a linear layer | `<linear>.lora_<A or B>.default.weight` |
| lora | those of all experts of a layer | `<experts>.lora.<gate_up or down>_<A or B>` |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from moetune.config.schema import Part
from moetune.models.moe import MoeLayer
from moetune.models.selection import Selection
from moetune.models.structure import ModelStructure

Matrix = Literal["gate_up", "down", "gate_up_bias", "down_bias"]
"""What a bank calls one expert's share of a stack."""


def parts_of(structure: ModelStructure, selection: Selection) -> dict[str, Part]:
    """Name in the adapted model -> part, of every parameter that trains on a run's ranks together."""
    return dict(_parts(structure, selection))


def _parts(structure: ModelStructure, selection: Selection) -> Iterator[tuple[str, Part]]:
    routers = {part.name for part in structure.parts_of("router")}
    for name in sorted(selection.full):
        yield whole_name(name, selection), "router" if name in routers else "other"
    for path in selection.lora_linears:
        yield from ((name, "lora") for name in linear_factors(path).values())
    for layer in structure.moe_layers:
        for expert in selection.experts.get(layer.index, ()):
            yield from ((trained_name(layer, expert, stack), "experts") for stack in stacks(layer))
        if selection.lora_experts.get(layer.index):
            yield from ((f"{layer.experts}.lora.{m}_{factor}", "lora") for m in ("gate_up", "down") for factor in "AB")


def whole_name(parameter: str, selection: Selection) -> str:
    """What the adapted model calls a parameter of the plain one."""
    module, _, last = parameter.rpartition(".")
    return f"{module}.base_layer.{last}" if module in selection.lora_linears else parameter


def linear_factors(path: str) -> dict[str, str]:
    """`A` and `B` -> the name of that factor on a linear layer."""
    return {factor: f"{path}.lora_{factor}.default.weight" for factor in "AB"}


def is_second_factor(name: str) -> bool:
    """Whether a parameter of the part `lora` is a B."""
    return name.endswith((".lora_B.default.weight", "_B"))


def stacks(layer: MoeLayer) -> list[str]:
    """Names of the parameters that hold a layer's experts in transformers."""
    names = ["gate_up_proj" if layer.shape.has_gate else "up_proj", "down_proj"]
    return names + [f"{name}_bias" for name in names] if layer.shape.has_bias else names


def matrix_of(stack: str) -> Matrix:
    """What a bank calls the share of one expert."""
    if stack.startswith("down"):
        return "down_bias" if stack.endswith("bias") else "down"
    return "gate_up_bias" if stack.endswith("bias") else "gate_up"


def trained_name(layer: MoeLayer, expert: int, stack: str) -> str:
    """The parameter that is a fully trained expert's share of a stack."""
    matrix = matrix_of(stack)
    kind = "bias" if matrix.endswith("_bias") else "weight"
    return f"{layer.experts}.trained.{expert}.{matrix.removesuffix('_bias')}.{kind}"
