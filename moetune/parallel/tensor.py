"""Tensor parallelism of attention, by transformers: its plan for a model, and its layers."""

from __future__ import annotations

import re

from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from moetune.anatomy.anatomy import Anatomy
from moetune.errors import UserError

_SPLIT = ("colwise", "rowwise")
_LEFT_ALONE = ("replicated_with_grad_allreduce",)  # a norm over what is split: nothing to do while it is frozen


def split_matrices(model: PreTrainedModel, anatomy: Anatomy, tp: DeviceMesh) -> None:
    """Splits the linear layers of attention over the ranks of `tp`, heads by heads.

    LoRA follows its layer: B of one whose rows are split is split too, and A of one whose columns are.

    Raises:
        UserError: transformers has no plan for this model, or one with layers that cannot be split in training; or what
            would be split is packed or trains in another way.
    """
    plan = {name: style for name, style in (model.tp_plan or {}).items() if ".experts" not in name}
    resolved: dict[str, str] = {}
    for path, linear in anatomy.linears().items():
        if linear.component != "attention":
            continue
        style = plan.get(re.sub(r"\.\d+\.", ".*.", path))
        if style not in _SPLIT:
            raise UserError(
                f"parallel.tp: transformers has no way to split {path} of model type {anatomy.model_type!r} in "
                "training; set parallel.tp: 1"
            )
        module = model.get_submodule(path)
        base = f"{path}.base_layer" if hasattr(module, "base_layer") else path
        weight = model.get_submodule(base).weight
        if not weight.is_floating_point():
            raise UserError(
                f"parallel.tp: {path} is packed (model.base), and packed matrices cannot be split; set parallel.tp: 1, "
                "or model.base to the precision of compute"
            )
        resolved[f"{base}.weight"] = resolved[base] = style
        if getattr(model.get_submodule(base), "bias", None) is not None:
            resolved[f"{base}.bias"] = style
        if base != path:
            factor = f"{path}.lora_B.default" if style == "colwise" else f"{path}.lora_A.default"
            resolved[f"{factor}.weight"] = resolved[factor] = style
    for name, parameter in model.named_parameters():
        style = plan.get(re.sub(r"\.\d+\.", ".*.", name.rpartition(".")[0]))
        if style in _LEFT_ALONE and parameter.requires_grad:
            raise UserError(
                f"parallel.tp: {name} trains, and each rank would see its own heads only; set parallel.tp: 1"
            )
    parameters = {name for name, _ in model.named_parameters()}
    apply_tensor_parallelism(model, tp, {name: style for name, style in resolved.items() if name in parameters})
    apply_tensor_parallelism(model, tp, {name: style for name, style in resolved.items() if name not in parameters})
