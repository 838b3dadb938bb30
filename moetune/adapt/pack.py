"""Puts what stays frozen into base precision: experts into banks, linear layers into packed ones."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor, nn
from transformers import PreTrainedModel

from moetune.anatomy.anatomy import Anatomy, Component
from moetune.anatomy.moe import MoeLayer
from moetune.anatomy.selection import Selection
from moetune.config import ModelConfig
from moetune.errors import UserError
from moetune.experts.bank import BankPlan, ExpertBank, LoraPlan, Part
from moetune.experts.host import Shuttle, stays_on_host
from moetune.experts.packed import DTYPES, PackedLinear, PackedStack
from moetune.parallel.placement import EVERYTHING, Placement

PACKED_COMPONENTS: tuple[Component, ...] = ("attention", "dense_mlp", "shared_experts")
_SMALLEST = 64  # a linear with fewer rows or columns (a scalar gate, say) is all precision and no memory: left alone

Fill = Callable[[str], None]
"""Gives the module at a path its storage and values, if it is still without."""


def has_values(path: str) -> None:
    """For models whose tensors need no drawing: loaded ones, and those that stay on meta."""


def pack_experts(
    model: PreTrainedModel,
    layer: MoeLayer,
    selection: Selection,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    fill: Fill = has_values,
    placement: Placement = EVERYTHING,
) -> None:
    """Replaces one layer's experts module by an `ExpertBank` on `device`."""
    experts = model.get_submodule(layer.experts)
    fill(layer.experts)
    bank = make_bank(experts, layer, selection, config, dtype, device, placement)
    for name in stacks(layer):
        stack = getattr(experts, name)
        for expert in range(layer.shape.num_experts):
            bank.put_(expert, part_of(name), out_in(layer, name, stack[expert]))
    install_bank(model, layer, bank)


def make_bank(
    experts: nn.Module,
    layer: MoeLayer,
    selection: Selection,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    placement: Placement = EVERYTHING,
) -> ExpertBank:
    """An empty bank for one layer's experts module, or for those that this rank holds."""
    if getattr(experts, "has_post_expert_norm", False):
        raise UserError(f"{layer.experts}: experts with a norm after them can be counted but not trained yet")
    lora_ids = selection.lora_experts.get(layer.index, ())
    lora = None
    if lora_ids and selection.lora is not None:
        settings = selection.lora
        lora = LoraPlan(lora_ids, settings.rank, settings.alpha, split=settings.gate_up == "split")
    return ExpertBank(
        layer.shape,
        BankPlan(selection.experts.get(layer.index, ()), lora),
        experts._apply_gate if layer.shape.has_gate else experts.act_fn,
        storage=config.base,
        double_quant=config.double_quant,
        dtype=dtype,
        device=device,
        on_host=config.experts_on == "host",
        held=placement.held(layer.index, layer.shape.num_experts),
    )


def install_bank(model: PreTrainedModel, layer: MoeLayer, bank: ExpertBank) -> None:
    """Puts a bank in the place of the experts module, of which only the activation lives on."""
    experts = model.get_submodule(layer.experts)
    for name in list(experts._parameters):
        delattr(experts, name)
    left = [name for name, _ in experts.named_parameters()]
    if left:
        raise UserError(
            f"{layer.experts}: its activation has weights of its own ({left[0]}); it can be counted, not trained"
        )
    model.set_submodule(layer.experts, bank)


def stacks(layer: MoeLayer) -> list[str]:
    """Names of the parameters that hold a layer's experts in transformers."""
    names = ["gate_up_proj" if layer.shape.has_gate else "up_proj", "down_proj"]
    return names + [f"{name}_bias" for name in names] if layer.shape.has_bias else names


def part_of(stack: str) -> Part:
    """What a bank calls the share of one expert."""
    if stack.startswith("down"):
        return "down_bias" if stack.endswith("bias") else "down"
    return "gate_up_bias" if stack.endswith("bias") else "gate_up"


def trained_name(layer: MoeLayer, expert: int, stack: str) -> str:
    """What a bank's model calls the parameter that is a fully trained expert's share of a stack."""
    part = part_of(stack)
    kind = "bias" if part.endswith("_bias") else "weight"
    return f"{layer.experts}.trained.{expert}.{part.removesuffix('_bias')}.{kind}"


def out_in(layer: MoeLayer, stack: str, tensor: Tensor) -> Tensor:
    """One expert's share as a bank holds it: weights [out, in]."""
    return tensor.T if layer.shape.is_transposed and not stack.endswith("bias") else tensor


def linears_to_pack(model: PreTrainedModel, anatomy: Anatomy, selection: Selection) -> list[str]:
    """Paths of the linear layers that stay frozen, are worth packing and are only ever called."""
    return [
        path
        for path, linear in anatomy.linears().items()
        if linear.component in PACKED_COMPONENTS
        and min(linear.in_features, linear.out_features) >= _SMALLEST
        and f"{path}.weight" not in selection.full
        and not read_directly(model, path, or_its_dtype=True)
    ]


def read_directly(model: PreTrainedModel, path: str, *, or_its_dtype: bool = False) -> bool:
    """Whether the code around a linear layer uses its weight without calling it, as Mamba's fused kernels do.

    With `or_its_dtype` also whether it casts to that weight's dtype, uint8 once packed, as DeepSeek's indexer does.
    """
    parent, _, name = path.rpartition(".")
    unless = "" if or_its_dtype else r"(?!\.(dtype|device)\b)"
    source = _source(type(model.get_submodule(parent)))
    return re.search(rf"\bself\.{name}\.weight\b{unless}", source) is not None


@functools.cache
def _source(kind: type[nn.Module]) -> str:
    """The code of a module's class and of what it inherits from other models."""
    return "".join(inspect.getsource(base) for base in kind.__mro__ if ".models." in base.__module__)


def pack_linear(
    model: PreTrainedModel,
    path: str,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    fill: Fill = has_values,
) -> None:
    """Replaces one linear layer by a packed one on `device`; leaves it where base and compute precision agree."""
    linear = model.get_submodule(path)
    fill(path)
    if DTYPES.get(config.base) == dtype:
        return
    packed: nn.Module
    if config.base == "nf4":
        packed = _linear_4bit(linear, config.double_quant, dtype, device)
    else:
        weight, bias = linear.weight.to(device), linear.bias
        packed = PackedLinear(weight, None if bias is None else bias.to(device), config.base)
    model.set_submodule(path, packed.requires_grad_(False))


def _linear_4bit(linear: nn.Linear, double_quant: bool, dtype: torch.dtype, device: torch.device) -> Linear4bit:
    packed = Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=dtype,
        compress_statistics=double_quant,
        quant_type="nf4",
        device="meta",
    )
    packed.weight = Params4bit(
        linear.weight.data,
        requires_grad=False,
        compress_statistics=double_quant,
        quant_type="nf4",
        module=packed,
    )
    packed.bias = linear.bias
    # On some CPUs bitsandbytes repacks the weight in place at the first evaluation, and then records no gradient.
    packed.support_avx512bf16_for_cpu = False
    return packed if device.type == "meta" else packed.to(device)


def refuse_unpacked(model: PreTrainedModel, anatomy: Anatomy, selection: Selection, config: ModelConfig) -> None:
    """Raises `UserError` if an expert or a linear layer that should be in base precision is not."""
    for layer in anatomy.moe_layers:
        bank = model.get_submodule(layer.experts)
        trained = selection.experts.get(layer.index, ())
        held = bank.held if isinstance(bank, ExpertBank) else range(layer.shape.num_experts)
        expected = sum(expert not in trained for expert in held)
        packed = isinstance(bank, ExpertBank) and bank.gate_up.count == bank.down.count == expected
        if not packed or {bank.gate_up.storage, bank.down.storage} != {config.base}:
            raise UserError(f"{layer.experts}: {expected} experts should be stored as {config.base} and are not")
    if config.base != "nf4":
        return
    for path in linears_to_pack(model, anatomy, selection):
        linear = model.get_submodule(path)
        linear = getattr(linear, "base_layer", linear)
        if not isinstance(linear, Linear4bit) or not (linear.weight.is_meta or linear.weight.bnb_quantized):
            raise UserError(f"{path}: should be stored as nf4 and is not")


def share_shuttle(model: PreTrainedModel, anatomy: Anatomy, device: torch.device) -> None:
    """Lets one shuttle bring the experts that stay on the host, layer by layer."""
    banks = [model.get_submodule(layer.experts) for layer in anatomy.moe_layers]
    layers = [(bank.gate_up, bank.down) for bank in banks]
    shuttle = Shuttle(layers, device)
    for stack in (stack for layer in layers for stack in layer):
        stack.shuttle = shuttle


def refuse_misplaced(model: PreTrainedModel, config: ModelConfig, device: torch.device) -> None:
    """Raises `UserError` naming the first tensor that is not where the run file says.

    Only the packed experts may be on the host, if asked for; what trains never is. A placement that goes by sizes, such
    as `device_map="auto"`, puts onto the host whatever comes last, and moves it to the GPU and back in every step.
    """
    by_design = set()
    for path, module in model.named_modules():
        if isinstance(module, PackedStack) and module.on_host:
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
