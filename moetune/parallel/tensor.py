"""Tensor parallelism of attention, by transformers: its plan for a model, and its layers."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from moetune.models.structure import ModelStructure
from moetune.run.tensor_plan import SPLIT, style_of, tensor_plan


def split_matrices(model: PreTrainedModel, structure: ModelStructure, tp: DeviceMesh) -> None:
    """Splits the linear layers of attention over the ranks of `tp`, heads by heads.

    LoRA follows its layer: B of one whose rows are split is split too, and A of one whose columns are.
    """
    plan = tensor_plan(model)
    resolved: dict[str, str] = {}
    for path in structure.linears("attention"):
        style = style_of(path, plan)
        assert style in SPLIT, f"{path} cannot be split (run.validation)"
        module = model.get_submodule(path)
        base = f"{path}.base_layer" if hasattr(module, "base_layer") else path
        resolved[f"{base}.weight"] = resolved[base] = style
        if getattr(model.get_submodule(base), "bias", None) is not None:
            resolved[f"{base}.bias"] = style
        if base != path:
            factor = f"{path}.lora_B.default" if style == "colwise" else f"{path}.lora_A.default"
            resolved[f"{factor}.weight"] = resolved[factor] = style
    parameters = {name for name, _ in model.named_parameters()}
    apply_tensor_parallelism(model, tp, {name: style for name, style in resolved.items() if name in parameters})
    apply_tensor_parallelism(model, tp, {name: style for name, style in resolved.items() if name not in parameters})
