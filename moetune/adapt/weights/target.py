"""`LoadTarget`: puts weights from any source into expert banks, quantized linear layers and parameters.

Checkpoints (published.py), random draws (random.py) and quantized bases (quantized_base.py) all use its methods.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moetune.adapt.layers.table import HostTable
from moetune.compat.bitsandbytes import Linear4bit, Params4bit
from moetune.compat.transformers import activation_of, dtypes_kept
from moetune.config.resolved import ResolvedModelConfig
from moetune.config.schema import Storage
from moetune.experts.bank import BankPlan, ExpertBank, ExpertLora, LoraPlan
from moetune.experts.context import ExpertContext
from moetune.experts.host import stays_on_host
from moetune.experts.quantized import QuantizedLinear
from moetune.formats.base import Quantized
from moetune.formats.nf4 import BitsAndBytes, empty_linear
from moetune.formats.table import format_of
from moetune.models.moe import MoeLayer
from moetune.models.selection import Selection
from moetune.models.structure import ModelStructure
from moetune.run.dtypes import DTYPES
from moetune.run.names import matrix_of
from moetune.run.placement import EVERYTHING, Placement
from moetune.tensor_files import Stored


class LoadTarget:
    """A model on the meta device that is filled with weights one by one.

    A frozen expert's matrices are quantized into the layer's bank (`ExpertBank`), and a linear layer's weight is
    quantized, as soon as the weight is put; so neither host nor GPU ever holds the whole model in 16 bits.

    In the methods, `path` is the path of a module in the model: a linear layer, or the module with a layer's experts.
    `stack` is transformers' name of the parameter that holds a layer's experts, such as `gate_up_proj`.

    Args:
        structure, selection: the structure of the whole model, and what trains; of a pipeline `model` may lack layers.
        config: precision of the weights, and the memory that holds the experts.
        linears: path -> storage of the linear layers that are stored in the precision `model.base`.
        device: where weights are put.
        context: settings and hooks that the expert banks share.
        placement: the experts that this rank holds.
        on_read: called repeatedly with the fraction of the model's parameters that has been put (0 to 1).

    Attributes:
        layers: path of a layer's experts module -> the layer.
        formats: path of each of `linears`, and of each layer's experts module -> the format in which it is stored.
        banks: path of a layer's experts module -> its bank, for banks that have been created.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        structure: ModelStructure,
        selection: Selection,
        config: ResolvedModelConfig,
        linears: Mapping[str, Storage],
        device: torch.device,
        *,
        context: ExpertContext,
        placement: Placement = EVERYTHING,
        on_read: Callable[[float], None] | None = None,
    ) -> None:
        self.model, self.config, self.device, self.dtype = model, config, device, DTYPES[config.dtype]
        modules, self._moe_layers = dict(model.named_modules()), structure.moe_layers
        self.layers = {layer.experts: layer for layer in structure.moe_layers if layer.experts in modules}
        self.linears = linears
        stored = {x.experts: config.storage_of("experts", x.index) for x in structure.moe_layers} | {**linears}
        self.formats = {path: format_of(storage, config.double_quant) for path, storage in stored.items()}
        self.banks: dict[str, ExpertBank] = {}
        self._selection, self._context, self._placement = selection, context, placement
        self._on_read, self._read = on_read, 0
        self._all = sum(parameter.numel() for parameter in model.parameters())
        self._kept_dtypes = dtypes_kept(model, self.dtype)

    # --- Experts ----------------------------------------------------------------------------------------------------

    def make_banks(self) -> None:
        """Create the banks of all layers first, so that temporary tensors leave no gaps between them in memory.

        For layers on other ranks of a pipeline the initial LoRA factors are drawn and dropped, so that those of a layer
        do not depend on the rank that holds it.
        """
        for layer in self._moe_layers:
            if layer.experts in self.layers:
                self.bank(layer.experts)
            elif (plan := LoraPlan.of(self._selection, layer)) is not None:
                ExpertLora(plan, (), layer.shape, layer.shape.gate_up_rows, self.device)

    def bank(self, path: str) -> ExpertBank:
        """Return the bank with the experts of one layer that this rank holds; create it if there is none."""
        if path not in self.banks:
            layer, selection = self.layers[path], self._selection
            self.banks[path] = ExpertBank(
                layer.shape,
                BankPlan(selection.experts.get(layer.index, ()), LoraPlan.of(selection, layer)),
                activation_of(self.model.get_submodule(path), has_gate=layer.shape.has_gate),
                storage=self.formats[path].name,
                double_quant=self.config.double_quant,
                dtype=self.dtype,
                device=self.device,
                held=self._placement.held(layer.index, layer.shape.num_experts),
                layer=layer.index,
                context=self._context,
            )
        return self.banks[path]

    def put_expert(self, path: str, stack: str, expert: int, weight: Tensor) -> None:
        """Store one expert's matrix or bias, a matrix quantized unless the expert trains. `weight` is the expert's
        slice of the stack, in the model's layout, of any dtype; ignored if this rank does not hold the expert."""
        self.bank(path).put_(expert, matrix_of(stack), out_in(self.layers[path], stack, weight))
        self._note(weight.numel())

    def put_quantized_expert(self, path: str, stack: str, expert: int, *pieces: Mapping[str, Tensor]) -> None:
        """Store a frozen expert's matrix as a checkpoint has quantized it. A piece maps buffer names of the bank
        (`data`, `absmax`, …) to tensors; there is one for the whole matrix or, if `pieces_of` returns 2, one for gate
        and one for up."""
        layer = self.layers[path]
        self.bank(path).put_quantized_(expert, matrix_of(stack), *pieces)
        self._note(getattr(self.model.get_submodule(path), stack).numel() // layer.shape.num_experts)

    def pieces_of(self, path: str, stack: str, expert: int) -> tuple[int, tuple[int, int]] | None:
        """Return how many pieces a frozen expert's matrix is quantized in, and the shape [out, in] of each.

        None if the expert trains, or the stack holds biases, which are not quantized.
        """
        bank, matrix = self.bank(path), matrix_of(stack)
        if expert not in bank.frozen_slots or matrix.endswith("_bias"):
            return None
        projection = bank.gate_up if matrix == "gate_up" else bank.down
        return projection.pieces, (projection.shape[0] // projection.pieces, projection.shape[1])

    def install(self, path: str) -> None:
        """Replace a layer's experts module in the model by its bank; call it once all weights of the layer are put.

        The module's own parameters are removed, because it can outlive the replacement: the bank computes the
        activation by a function of the module.
        """
        experts = self.model.get_submodule(path)
        for name, _ in [*experts.named_parameters(recurse=False)]:
            delattr(experts, name)
        self.model.set_submodule(path, self.bank(path))

    def release(self, path: str) -> None:
        """Free a layer's bank and experts once they are written to disk; an empty module takes their place."""
        self.banks.pop(path, None)
        self.model.set_submodule(path, nn.Module())

    # --- Linear layers ----------------------------------------------------------------------------------------------

    def put_linear(self, path: str, weight: Tensor) -> None:
        """Store the weight of a linear layer [out, in] of any dtype, and replace the layer by a quantized one.

        The layer stays, with the weight unquantized, if `model.base` is the compute dtype, or its format is one
        of experts only.
        """
        linear = cast(nn.Linear, self.model.get_submodule(path))
        self._note(weight.numel())
        format = self.formats[path]
        if format.dtype == self.dtype or not (format.quantizes_linears or format.dtype):
            linear.weight = nn.Parameter(weight.to(self.dtype), requires_grad=False)
        else:
            quantized = format.linear(linear, weight, self.dtype, self.device)
            quantized = quantized or QuantizedLinear(weight, linear.bias, format.name)
            self.model.set_submodule(path, quantized.requires_grad_(False))

    def put_quantized_linear(self, path: str, stored: Quantized) -> None:
        """Store the weight of a linear layer as a checkpoint has quantized it in `model.base`; replace the layer."""
        if isinstance(stored, BitsAndBytes):
            state = stored.stored()
            self.put_4bit(path, state.pop(""), state)
            return
        linear = cast(nn.Linear, self.model.get_submodule(path))
        layer = QuantizedLinear(linear.weight, linear.bias, self.formats[path].name, self.device)
        layer.stack.put_quantized_(0, stored.quantized())
        self.model.set_submodule(path, layer.requires_grad_(False))
        self._note(linear.weight.numel())

    def put_4bit(self, path: str, data: Tensor, state: dict[str, Tensor]) -> None:
        """Store the weight of a linear layer that is quantized in 4 bits already.

        `data` has two values per byte, `state` the quantization state under bitsandbytes' names. The layer is replaced
        by a `Linear4bit` unless it is one.
        """
        linear = self.model.get_submodule(path)
        if not isinstance(linear, Linear4bit):
            linear = empty_linear(cast(nn.Linear, linear), self.dtype, "nested_absmax" in state)
            self.model.set_submodule(path, linear.requires_grad_(False))
        weight = Params4bit.from_prequantized(
            data=data, quantized_stats=state, requires_grad=False, device=self.device, module=linear
        )
        weight.quant_state.dtype = self.dtype
        linear.weight, linear.quant_state = weight, weight.quant_state
        self._note(linear.in_features * linear.out_features)

    # --- All else ---------------------------------------------------------------------------------------------------

    def put(self, name: str, tensor: Tensor) -> None:
        """Store a parameter or buffer under its name in the model, in the dtype that the model has for it.

        Raises `RuntimeError` if it has another shape than the model's.
        """
        path, _, last = name.rpartition(".")
        module = self.model.get_submodule(path)
        if isinstance(module, HostTable) and last == "weight":
            module.allocate(self.device, self._kept_dtypes.get(name))
        current = getattr(module, last)
        if current.shape != tensor.shape:
            raise RuntimeError(f"{name} is {[*tensor.shape]}, not {[*current.shape]}")
        if stays_on_host(current):
            current.copy_(tensor)
        else:
            is_buffer = last in dict(module.named_buffers(recurse=False))
            dtype = self._kept_dtypes.get(name, current.dtype) if current.is_floating_point() else tensor.dtype
            tensor = tensor.to(self.device, dtype)
            setattr(module, last, tensor if is_buffer else nn.Parameter(tensor, requires_grad=False))
        self._note(tensor.numel())

    def put_table(self, path: str, parts: Sequence[Stored | Quantized]) -> bool:
        """Read an embedding that stays in host memory from a checkpoint's tensors, whose rows follow each other, block
        by block; return whether it does. Raises `RuntimeError` if it has another number of rows."""
        if not isinstance(module := self.model.get_submodule(path), HostTable):
            return False
        table = module.allocate(self.device, self._kept_dtypes.get(f"{path}.weight"))
        if (rows := sum(part.shape[0] for part in parts)) != len(table):
            raise RuntimeError(f"{path}.weight has {rows} rows, not {len(table)}")
        begin = 0
        for part in parts:
            for start, stop in part.blocks():
                table[begin + start : begin + stop] = part.rows(start, stop)
            begin += part.shape[0]
        self._note(table.numel())
        return True

    def _note(self, count: int) -> None:
        self._read += count
        if self._on_read is not None:
            self._on_read(min(1.0, self._read / self._all))


def out_in(layer: MoeLayer, stack: str, tensor: Tensor) -> Tensor:
    """Return one expert's slice of a stack in the layout of a bank: a view [out, in] of a weight, a bias as it is."""
    return tensor.T if layer.shape.is_transposed and not stack.endswith("bias") else tensor
