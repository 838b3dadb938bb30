"""Checks of a built model: frozen weights quantized, every tensor on its device."""

import torch
from transformers import PreTrainedModel

from moetune.compat.bitsandbytes import Linear4bit
from moetune.compat.torch import HostModule
from moetune.errors import UserError
from moetune.experts.bank import ExpertBank
from moetune.experts.host import stays_on_host
from moetune.experts.quantized import QuantizedExperts
from moetune.formats.table import FORMATS
from moetune.run.resolve import ResolvedRun


def refuse_unquantized(model: PreTrainedModel, run: ResolvedRun) -> None:
    """Raise `UserError` if a frozen weight is not stored in the precision `model.base`.

    This concerns all frozen experts, and where a library quantizes them also the linear layers that the run quantizes.
    """
    selection, config = run.selection, run.config.model
    for layer in run.structure.moe_layers:
        bank = model.get_submodule(layer.experts)
        trained = selection.experts.get(layer.index, ())
        held = bank.held if isinstance(bank, ExpertBank) else range(layer.shape.num_experts)
        expected = sum(expert not in trained for expert in held)
        is_whole = isinstance(bank, ExpertBank) and bank.gate_up.count == bank.down.count == expected
        storage = config.storage_of("experts", layer.index)
        if not is_whole or {bank.gate_up.storage, bank.down.storage} != {storage}:
            raise UserError(f"{layer.experts}: {expected} experts should be stored as {storage} and are not")
    for path, storage in run.quantized_linears.items():
        if not FORMATS[storage].has_own_linear:
            continue
        linear = model.get_submodule(path)
        linear = getattr(linear, "base_layer", linear)
        if not isinstance(linear, Linear4bit) or not (
            linear.weight.is_meta or getattr(linear.weight, "bnb_quantized", False)
        ):
            raise UserError(f"{path}: should be stored as {storage} and is not")


def refuse_misplaced(model: PreTrainedModel, device: torch.device) -> None:
    """Raise `UserError` naming the first tensor that is not where the run file says.

    All tensors must be on `device`, except that those under `model.experts_on: host` and `embeddings_on: host` must be
    in host memory, and pinned if the device is a GPU. This catches placements by size, such as `device_map="auto"`,
    which put the last layers on the host and move them to the GPU and back in every step.
    """
    by_design = dict[str, str]()
    for path, module in model.named_modules():
        if isinstance(module, HostModule):
            key = "experts_on" if isinstance(module, QuantizedExperts) else "embeddings_on"
            by_design |= {f"{path}.{name}": f"model.{key}: host" for name in module.names_on_host()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        kind = "trains" if tensor.requires_grad else "is frozen"
        if name in by_design:
            if not tensor.is_meta and not (tensor.device.type == "cpu" and stays_on_host(tensor)):
                raise UserError(f"{by_design[name]}, but {name} is on {tensor.device}")
            if device.type == "cuda" and tensor.numel() and not tensor.is_pinned():
                raise UserError(f"{by_design[name]}, but {name} is not in pinned memory")
        elif tensor.device.type != device.type or stays_on_host(tensor):
            where = "the host" if stays_on_host(tensor) else tensor.device
            raise UserError(f"{name} {kind} and should be on {device}; it is on {where}")
