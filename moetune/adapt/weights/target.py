"""The model that weights are loaded into: the one place that puts them into banks, quantized linears and parameters.

Every source fills it by the same few methods: a checkpoint (checkpoint.py), random draws (random.py) and a quantized
base (quantized_base.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import cast

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor, nn
from transformers import PreTrainedModel

from moetune.compat.bitsandbytes import prepare_4bit
from moetune.compat.transformers import activation_of, dtypes_kept
from moetune.config.resolved import ResolvedModelConfig
from moetune.experts.bank import BankPlan, ExpertBank, LoraPlan
from moetune.experts.context import ExpertContext
from moetune.experts.host import stays_on_host
from moetune.experts.quantized import QuantizedLinear
from moetune.models.moe import MoeLayer
from moetune.models.selection import Selection
from moetune.models.structure import ModelStructure
from moetune.run.dtypes import DTYPES
from moetune.run.names import matrix_of
from moetune.run.placement import EVERYTHING, Placement


class LoadTarget:
    """A model on the meta device whose weights arrive one by one.

    An expert's matrices are quantized into the layer's bank, unless it trains, and a linear layer when its weight
    arrives; so neither host nor GPU ever holds the model in 16 bits.

    Args:
        model: changed in place.
        linears: paths of the linear layers that are stored in base precision.
        placement: the experts that this rank holds.
        on_read: called with the share of the model's parameters that has arrived.

    Attributes:
        layers: path of each layer's experts module -> the layer.
        banks: path -> its bank, once it is made.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        structure: ModelStructure,
        selection: Selection,
        config: ResolvedModelConfig,
        linears: Collection[str],
        device: torch.device,
        *,
        context: ExpertContext,
        placement: Placement = EVERYTHING,
        on_read: Callable[[float], None] | None = None,
    ) -> None:
        self.model, self.config, self.device, self.dtype = model, config, device, DTYPES[config.dtype]
        self.layers = {layer.experts: layer for layer in structure.moe_layers}
        self.linears = dict.fromkeys(linears)
        self.banks: dict[str, ExpertBank] = {}
        self._selection, self._context, self._placement = selection, context, placement
        self._on_read, self._read = on_read, 0
        self._all = sum(part.numel for part in structure.parameters)
        self._kept_dtypes = dtypes_kept(model, self.dtype)

    # --- Experts ----------------------------------------------------------------------------------------------------

    def make_banks(self) -> None:
        """Make every layer's bank before any weight arrives: what is on its way then leaves no holes between them."""
        for path in self.layers:
            self.bank(path)

    def bank(self, path: str) -> ExpertBank:
        """The bank of one layer's experts, or of those that this rank holds; made when first asked for."""
        if path not in self.banks:
            layer, selection = self.layers[path], self._selection
            lora, ids = selection.lora, selection.lora_experts.get(layer.index, ())
            plan = LoraPlan(ids, lora.rank, lora.plain_alpha, split=lora.gate_up == "split") if lora and ids else None
            self.banks[path] = ExpertBank(
                layer.shape,
                BankPlan(selection.experts.get(layer.index, ()), plan),
                activation_of(self.model.get_submodule(path), has_gate=layer.shape.has_gate),
                storage=self.config.base,
                double_quant=self.config.double_quant,
                dtype=self.dtype,
                device=self.device,
                held=self._placement.held(layer.index, layer.shape.num_experts),
                layer=layer.index,
                context=self._context,
            )
        return self.banks[path]

    def put_expert(self, path: str, stack: str, expert: int, weight: Tensor) -> None:
        """Store one expert's share of a stack, in the model's layout."""
        self.bank(path).put_(expert, matrix_of(stack), out_in(self.layers[path], stack, weight))
        self._note(weight.numel())

    def put_quantized_expert(self, path: str, stack: str, expert: int, *pieces: Mapping[str, Tensor]) -> None:
        """Store a frozen expert's matrix as a checkpoint has it quantized: gate and up each where they are apart."""
        layer = self.layers[path]
        self.bank(path).put_quantized_(expert, matrix_of(stack), *pieces)
        self._note(getattr(self.model.get_submodule(path), stack).numel() // layer.shape.num_experts)

    def pieces_of(self, path: str, stack: str, expert: int) -> tuple[int, tuple[int, int]] | None:
        """How many pieces a frozen expert's matrix is quantized in, and the shape of each; None if it is not."""
        bank, matrix = self.bank(path), matrix_of(stack)
        if expert not in bank.frozen_slots or matrix.endswith("_bias"):
            return None
        of = bank.gate_up if matrix == "gate_up" else bank.down
        return of.pieces, (of.shape[0] // of.pieces, of.shape[1])

    def install(self, path: str) -> None:
        """Put a layer's bank in the place of its experts module, of which only the activation is still used."""
        experts = self.model.get_submodule(path)
        for name, _ in [*experts.named_parameters(recurse=False)]:
            delattr(experts, name)
        self.model.set_submodule(path, self.bank(path))

    def release(self, path: str) -> None:
        """Let go of a layer's bank, which is stored elsewhere; the model goes on without these experts."""
        self.banks.pop(path, None)
        self.model.set_submodule(path, nn.Module())

    # --- Linear layers ----------------------------------------------------------------------------------------------

    def put_linear(self, path: str, weight: Tensor) -> None:
        """Quantize a linear layer's weight, and replace the layer; keep the layer where base and compute precision
        agree, and where the base is MXFP4, which is for experts."""
        linear = cast(nn.Linear, self.model.get_submodule(path))
        self._note(weight.numel())
        if DTYPES.get(self.config.base) == self.dtype or self.config.base == "mxfp4":
            linear.weight = nn.Parameter(weight, requires_grad=False)
            return
        quantized: nn.Module
        if self.config.base == "nf4":
            quantized = self._empty_4bit(linear, self.config.double_quant)
            quantized.weight = Params4bit(
                weight.data,
                requires_grad=False,
                compress_statistics=self.config.double_quant,
                quant_type="nf4",
                module=quantized,
            )
            if not weight.is_meta:
                quantized = quantized.to(self.device)
        else:
            quantized = QuantizedLinear(weight, linear.bias, self.config.base)
        self.model.set_submodule(path, quantized.requires_grad_(False))

    def put_4bit(self, path: str, data: Tensor, state: dict[str, Tensor]) -> None:
        """Store a linear layer's weight that is quantized in 4 bits already.

        Args:
            data: the weight's bytes.
            state: what bitsandbytes keeps beside them, by its names.
        """
        linear = self.model.get_submodule(path)
        if not isinstance(linear, Linear4bit):
            linear = self._empty_4bit(cast(nn.Linear, linear), "nested_absmax" in state)
            self.model.set_submodule(path, linear.requires_grad_(False))
        weight = Params4bit.from_prequantized(
            data=data, quantized_stats=state, requires_grad=False, device=self.device, module=linear
        )
        weight.quant_state.dtype = self.dtype
        linear.weight, linear.quant_state = weight, weight.quant_state
        self._note(linear.in_features * linear.out_features)

    def _empty_4bit(self, linear: nn.Linear, double_quant: bool) -> Linear4bit:
        empty = Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=self.dtype,
            compress_statistics=double_quant,
            quant_type="nf4",
            device="meta",
        )
        empty.bias = linear.bias
        prepare_4bit(empty)
        return empty

    # --- All else ---------------------------------------------------------------------------------------------------

    def put(self, name: str, tensor: Tensor) -> None:
        """Store a parameter or a buffer under its name in the model, in the dtype that it has there."""
        path, _, last = name.rpartition(".")
        module = self.model.get_submodule(path)
        there = getattr(module, last)
        if there.shape != tensor.shape:
            raise RuntimeError(f"{name} is {[*tensor.shape]}, not {[*there.shape]}")
        if stays_on_host(there):
            there.copy_(tensor)
        else:
            is_buffer = last in dict(module.named_buffers(recurse=False))
            dtype = self._kept_dtypes.get(name, there.dtype) if there.is_floating_point() else tensor.dtype
            tensor = tensor.to(self.device, dtype)
            setattr(module, last, tensor if is_buffer else nn.Parameter(tensor, requires_grad=False))
        self._note(tensor.numel())

    def _note(self, count: int) -> None:
        self._read += count
        if self._on_read is not None:
            self._on_read(min(1.0, self._read / self._all))


def out_in(layer: MoeLayer, stack: str, tensor: Tensor) -> Tensor:
    """One expert's share of a stack as a bank holds it: weights [out, in]."""
    return tensor.T if layer.shape.is_transposed and not stack.endswith("bias") else tensor
