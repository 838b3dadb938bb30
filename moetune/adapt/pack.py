"""Puts what stays frozen into base precision: experts into banks, linear layers into packed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor, nn
from transformers import PreTrainedModel

from moetune.compat.bitsandbytes import prepare_4bit
from moetune.compat.transformers import activation_of
from moetune.config.schema import ResolvedModelConfig
from moetune.errors import UserError
from moetune.experts.bank import BankPlan, ExpertBank, LoraPlan
from moetune.experts.context import ExpertContext
from moetune.experts.dense import DenseWeights
from moetune.experts.host import ExpertPrefetcher, stays_on_host
from moetune.experts.quantized import QuantizedExperts, QuantizedLinear
from moetune.models.moe import MoeLayer
from moetune.models.selection import Selection
from moetune.parallel.dispatch import TokenDispatcher
from moetune.parallel.ranks import Ranks
from moetune.run.dtypes import DTYPES
from moetune.run.names import matrix_of, stacks
from moetune.run.placement import EVERYTHING, Placement
from moetune.run.resolve import ResolvedRun

Fill = Callable[[str], None]
"""Gives the module at a path its storage and values, if it is still without."""


def has_values(path: str) -> None:
    """For models whose tensors need no drawing: loaded ones, and those that stay on meta."""


def make_expert_context(
    config: ResolvedModelConfig,
    selection: Selection,
    ranks: Ranks,
    device: torch.device,
    *,
    keep_rows: bool = False,
    expert_memory: int = 0,
    split_gate_up: bool = False,
    dense: DenseWeights | None = None,
) -> ExpertContext:
    """What the banks of a model on `device` share."""
    dispatcher = None
    if ranks.expert is not None and ranks.dense is not None:
        trained = {layer for kind in (selection.experts, selection.lora_experts) for layer, ids in kind.items() if ids}
        dispatcher = TokenDispatcher(ranks.placement.experts, trained, ranks.expert["ep"], ranks.dense["tp"])
    prefetcher = ExpertPrefetcher(device) if config.experts_on == "host" else None
    return ExpertContext(expert_memory, keep_rows, split_gate_up, prefetcher, dispatcher, dense)


def fill_bank(model: PreTrainedModel, layer: MoeLayer, bank: ExpertBank, fill: Fill = has_values) -> None:
    """Packs one layer's experts into its bank, which replaces their module."""
    experts = model.get_submodule(layer.experts)
    fill(layer.experts)
    for name in stacks(layer):
        stack = getattr(experts, name)
        for expert in range(layer.shape.num_experts):
            bank.put_(expert, matrix_of(name), out_in(layer, name, stack[expert]))
    install_bank(model, layer, bank)


def make_bank(
    experts: nn.Module,
    layer: MoeLayer,
    selection: Selection,
    config: ResolvedModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    placement: Placement = EVERYTHING,
    context: ExpertContext | None = None,
) -> ExpertBank:
    """An empty bank for one layer's experts module, or for those that this rank holds."""
    lora_ids = selection.lora_experts.get(layer.index, ())
    lora = None
    if lora_ids and selection.lora is not None:
        settings = selection.lora
        lora = LoraPlan(lora_ids, settings.rank, settings.plain_alpha, split=settings.gate_up == "split")
    return ExpertBank(
        layer.shape,
        BankPlan(selection.experts.get(layer.index, ()), lora),
        activation_of(experts, has_gate=layer.shape.has_gate),
        storage=config.base,
        double_quant=config.double_quant,
        dtype=dtype,
        device=device,
        held=placement.held(layer.index, layer.shape.num_experts),
        layer=layer.index,
        context=context,
    )


def install_bank(model: PreTrainedModel, layer: MoeLayer, bank: ExpertBank) -> None:
    """Puts a bank in the place of the experts module, of which only the activation lives on."""
    experts = model.get_submodule(layer.experts)
    for name in list(experts._parameters):
        delattr(experts, name)
    model.set_submodule(layer.experts, bank)


def out_in(layer: MoeLayer, stack: str, tensor: Tensor) -> Tensor:
    """One expert's share as a bank holds it: weights [out, in]."""
    return tensor.T if layer.shape.is_transposed and not stack.endswith("bias") else tensor


def quantize_linear(
    model: PreTrainedModel,
    path: str,
    config: ResolvedModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    fill: Fill = has_values,
) -> None:
    """Replaces one linear layer by a packed one on `device`; leaves it where base and compute precision agree, and
    where the base is MXFP4, which is for experts."""
    linear = cast(nn.Linear, model.get_submodule(path))
    fill(path)
    if DTYPES.get(config.base) == dtype or config.base == "mxfp4":
        return
    packed: nn.Module
    if config.base == "nf4":
        packed = _linear_4bit(linear, config.double_quant, dtype, device)
    else:
        weight, bias = linear.weight.to(device), linear.bias
        packed = QuantizedLinear(weight, None if bias is None else bias.to(device), config.base)
    model.set_submodule(path, packed.requires_grad_(False))


def keep_4bit(
    model: PreTrainedModel, path: str, stored: dict[str, Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    """Replaces a linear layer by one whose weight is `stored` as bitsandbytes has it, under an empty name, and what
    belongs to it."""
    linear = cast(nn.Linear, model.get_submodule(path))
    packed = _empty_4bit(linear, "nested_absmax" in stored, dtype)
    put_4bit(packed, stored.pop(""), stored, dtype, device)
    model.set_submodule(path, packed.requires_grad_(False))


def put_4bit(
    linear: Linear4bit, data: Tensor, state: dict[str, Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    """Gives a 4-bit layer a weight that is quantized already."""
    weight = Params4bit.from_prequantized(
        data=data, quantized_stats=state, requires_grad=False, device=device, module=linear
    )
    weight.quant_state.dtype = dtype
    linear.weight, linear.quant_state = weight, weight.quant_state


def _linear_4bit(linear: nn.Linear, double_quant: bool, dtype: torch.dtype, device: torch.device) -> Linear4bit:
    packed = _empty_4bit(linear, double_quant, dtype)
    packed.weight = Params4bit(
        linear.weight.data,
        requires_grad=False,
        compress_statistics=double_quant,
        quant_type="nf4",
        module=packed,
    )
    return packed if device.type == "meta" else packed.to(device)


def _empty_4bit(linear: nn.Linear, double_quant: bool, dtype: torch.dtype) -> Linear4bit:
    packed = Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=dtype,
        compress_statistics=double_quant,
        quant_type="nf4",
        device="meta",
    )
    packed.bias = linear.bias
    prepare_4bit(packed)
    return packed


def refuse_unquantized(model: PreTrainedModel, run: ResolvedRun) -> None:
    """Raises `UserError` if an expert or a linear layer that should be in base precision is not."""
    selection, config = run.selection, run.config.model
    for layer in run.structure.moe_layers:
        bank = model.get_submodule(layer.experts)
        trained = selection.experts.get(layer.index, ())
        held = bank.held if isinstance(bank, ExpertBank) else range(layer.shape.num_experts)
        expected = sum(expert not in trained for expert in held)
        packed = isinstance(bank, ExpertBank) and bank.gate_up.count == bank.down.count == expected
        if not packed or {bank.gate_up.storage, bank.down.storage} != {config.base}:
            raise UserError(f"{layer.experts}: {expected} experts should be stored as {config.base} and are not")
    if config.base != "nf4":
        return
    for path in run.quantized_linears:
        linear = model.get_submodule(path)
        linear = getattr(linear, "base_layer", linear)
        if not isinstance(linear, Linear4bit) or not (
            linear.weight.is_meta or getattr(linear.weight, "bnb_quantized", False)
        ):
            raise UserError(f"{path}: should be stored as nf4 and is not")


def refuse_misplaced(model: PreTrainedModel, config: ResolvedModelConfig, device: torch.device) -> None:
    """Raises `UserError` naming the first tensor that is not where the run file says.

    Only the packed experts may be on the host, if asked for; what trains never is. A placement that goes by sizes, such
    as `device_map="auto"`, puts onto the host whatever comes last, and moves it to the GPU and back in every step.
    """
    by_design = set()
    for path, module in model.named_modules():
        if isinstance(module, QuantizedExperts) and module.on_host:
            by_design |= {f"{path}.{name}" for name in module._buffers}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        kind = "trains" if tensor.requires_grad else "is frozen"
        if name in by_design:
            if not tensor.is_meta and not (tensor.device.type == "cpu" and stays_on_host(tensor)):
                raise UserError(f"model.experts_on: {config.experts_on}, but {name} is on {tensor.device}")
            if device.type == "cuda" and tensor.numel() and not tensor.is_pinned():
                raise UserError(f"model.experts_on: {config.experts_on}, but {name} is not in pinned memory")
        elif tensor.device.type != device.type or stays_on_host(tensor):
            where = "the host" if stays_on_host(tensor) else tensor.device
            raise UserError(f"{name} {kind} and should be on {device}; it is on {where}")
