"""Names of trained parameters, and each name's part (`router`, `experts`, `lora`, `other`).

| part | parameter | name |
|---|---|---|
| router, other | a parameter of the plain model | its name there; `base_layer` is inserted where PEFT wraps the layer |
| experts | a matrix or bias of an expert that trains | `<experts>.trained.<id>.<gate_up or down>.<weight or bias>` |
| lora | PEFT's factors of a linear layer | `<linear>.lora_<A or B>.default.weight` |
| lora | factors of all experts of a layer | `<experts>.lora.<gate_up or down>_<A or B>` |

The plain model is the one that transformers builds; the adapted model is the same with LoRA on linear layers and with
expert banks (experts/bank.py) in place of the modules of experts. `<experts>` and `<linear>` are paths of modules.
"""

from typing import Literal

from moetune.config.schema import Part
from moetune.models.moe import MoeLayer
from moetune.models.selection import Selection
from moetune.models.structure import ModelStructure

Matrix = Literal["gate_up", "down", "gate_up_bias", "down_bias"]
"""An expert bank's name for a matrix or bias of an expert."""


def parts_by_name(structure: ModelStructure, selection: Selection) -> dict[str, Part]:
    """Return name in the adapted model -> part, for the parameters that train on any rank."""
    routers = {parameter.name for parameter in structure.parameters_of("router")}
    parts: dict[str, Part] = {
        whole_name(name, selection): "router" if name in routers else "other" for name in sorted(selection.full)
    }
    for path in selection.lora_linears:
        parts |= dict.fromkeys(linear_factors(path).values(), "lora")
    for layer in structure.moe_layers:
        for expert in selection.experts.get(layer.index, ()):
            parts |= dict.fromkeys((trained_name(layer, expert, stack) for stack in stacks(layer)), "experts")
        if selection.lora_experts.get(layer.index):
            parts |= {f"{layer.experts}.lora.{m}_{factor}": "lora" for m in ("gate_up", "down") for factor in "AB"}
    return parts


def whole_name(parameter: str, selection: Selection) -> str:
    """Return the name in the adapted model of a parameter that trains in full, given its name in the plain model."""
    module, _, last = parameter.rpartition(".")
    return f"{module}.base_layer.{last}" if module in selection.lora_linears else parameter


def linear_factors(path: str) -> dict[str, str]:
    """Return `{"A": name, "B": name}` of the LoRA factors of the linear layer at `path`."""
    return {factor: f"{path}.lora_{factor}.default.weight" for factor in "AB"}


def is_second_factor(name: str) -> bool:
    """Return whether a parameter of the part `lora` is a factor B."""
    return name.endswith((".lora_B.default.weight", "_B"))


def stacks(layer: MoeLayer) -> list[str]:
    """Return transformers' names of the parameters that hold all experts of a layer, such as `gate_up_proj`."""
    names = ["gate_up_proj" if layer.shape.has_gate else "up_proj", "down_proj"]
    return names + [f"{name}_bias" for name in names] if layer.shape.has_bias else names


def matrix_of(stack: str) -> Matrix:
    """Return the bank's name for a parameter of `stacks`, such as `gate_up` for `gate_up_proj` or `up_proj`."""
    if stack.startswith("down"):
        return "down_bias" if stack.endswith("bias") else "down"
    return "gate_up_bias" if stack.endswith("bias") else "gate_up"


def trained_name(layer: MoeLayer, expert: int, stack: str) -> str:
    """Return the name of the trained matrix or bias of one expert, given its id, that `stack`, one of `stacks(layer)`,
    holds in the plain model."""
    matrix = matrix_of(stack)
    kind = "bias" if matrix.endswith("_bias") else "weight"
    return f"{layer.experts}.trained.{expert}.{matrix.removesuffix('_bias')}.{kind}"
