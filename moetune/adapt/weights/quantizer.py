"""Weights that are packed while they are read: a transformers quantizer.

transformers reads a checkpoint tensor by tensor, renames it and, where its modules hold experts in one stack, merges
them. Here each expert's matrices are read, packed into their bank and let go one by one, and each linear layer when its
weight arrives; so neither host nor GPU ever holds the model in 16 bit. What trains goes into its bank in full.

    from transformers import AutoModelForCausalLM
    from moetune.adapt.weights.quantizer import MoetuneConfig

    AutoModelForCausalLM.from_pretrained(folder, quantization_config=MoetuneConfig(base="nf4"), device_map="cuda")
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    SkipParameters,
    WeightConverter,
)
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moetune.adapt.pack import install_bank, keep_4bit, make_bank, make_expert_context, out_in, quantize_linear
from moetune.adapt.weights.lazy_tensor import LazyTensor
from moetune.compat.transformers import mark_initialized
from moetune.config.schema import ResolvedModelConfig
from moetune.errors import UserError
from moetune.experts.bank import ExpertBank
from moetune.experts.context import ExpertContext
from moetune.models.hub.names import STACKS
from moetune.models.hub.quantized import BitsAndBytes, Mxfp4
from moetune.models.hub.tensor_files import Stored
from moetune.models.moe import MoeLayer
from moetune.models.selection import Selection
from moetune.models.structure import ModelStructure, read_structure
from moetune.parallel.ranks import SINGLE_RANK
from moetune.run import validation
from moetune.run.linears import linears_to_quantize
from moetune.run.names import matrix_of, stacks
from moetune.run.placement import EVERYTHING, Placement
from moetune.run.resolve import raise_problems

METHOD = "moetune"


@register_quantization_config(METHOD)
class MoetuneConfig(QuantizationConfigMixin):
    """How a model is stored: `quantization_config=` of `from_pretrained`.

    Args:
        base: precision of what stays frozen, as `model.base` of a run file.
        double_quant: as `model.double_quant`.
        experts_on: as `model.experts_on`.
        selection: what trains, and so is not packed; nothing by default. Not part of the saved configuration.
        on_read: is told, again and again, which share of the model has been read.
        on_bank: is given each bank when it is full, by the path of its layer's experts; what it holds is let go then.
        done: paths of experts that need not be read.
        placement: the experts that this rank holds; the others' are not read where a checkpoint has them apart.
        structure: of the model, if it has been read.
        context: what the banks share; by default what one GPU needs.
    """

    def __init__(
        self,
        base: str = "nf4",
        double_quant: bool = True,
        experts_on: str = "gpu",
        selection: Selection | None = None,
        on_read: Callable[[float], None] | None = None,
        on_bank: Callable[[str, ExpertBank], None] | None = None,
        done: Collection[str] = (),
        placement: Placement = EVERYTHING,
        structure: ModelStructure | None = None,
        context: ExpertContext | None = None,
        **kwargs: Any,
    ) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        settings = {
            "path": "unread",
            "base": base,
            "double_quant": double_quant,
            "experts_on": experts_on,
            "dtype": "fp32",
        }
        self.model = ResolvedModelConfig.model_validate(settings)
        self.selection = selection or Selection(frozenset(), {}, {}, (), None)
        self.on_read, self.on_bank, self.done, self.placement = on_read, on_bank, done, placement
        self.structure, self.context = structure, context

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": METHOD, "base": self.model.base, "double_quant": self.model.double_quant}


@register_quantizer(METHOD)
class MoetuneQuantizer(HfQuantizer):
    """Packs a model as it is loaded. A checkpoint that does not fit raises a `UserError` when all has been read."""

    quantization_config: MoetuneConfig

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    @property
    def quantized_element_size(self) -> float:
        return 0.0  # transformers need not warm up the allocator for what never arrives in 16 bit

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, device_map: dict[str, Any] | None = None, dtype: Any = None, **kwargs: Any
    ) -> None:
        selection = self.quantization_config.selection
        device = torch.device((device_map or {}).get("", "cpu"))
        dtype = model.config.dtype
        self.structure: ModelStructure = self.quantization_config.structure or read_structure(model)
        raise_problems(validation.unsupported_experts(model, self.structure))
        self.problems: list[str] = []
        self._read, self._all = 0, sum(part.numel for part in self.structure.parameters)
        self._model, self.device, self.dtype = model, device, dtype
        self.linears = set(linears_to_quantize(model, self.structure, selection))
        self.layers = {layer.experts: layer for layer in self.structure.moe_layers}
        self.banks: dict[str, ExpertBank] = {}
        config = self.quantization_config
        self.context = config.context or make_expert_context(config.model, selection, SINGLE_RANK, device)
        self.missing = {
            path: {(name, expert) for name in stacks(layer) for expert in range(layer.shape.num_experts)}
            for path, layer in self.layers.items()
            if path not in self.quantization_config.done
        }

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        path, _, name = param_name.rpartition(".")
        return (path in self.linears and name == "weight") or (
            path in self.layers and name in stacks(self.layers[path])
        )

    def get_quantize_ops(self) -> ConversionOps:
        return _Pack(self)

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        updated = []
        for conversion in weight_conversions:
            if isinstance(conversion, WeightConverter) and _is_of_experts(conversion):
                conversion = _ExpertByExpert.of(conversion)
            updated.append(conversion)
        return updated

    def is_elsewhere(self, path: str, expert: int) -> bool:
        """Whether another rank holds this expert of a layer."""
        layer = self.layers[path]
        held = self.quantization_config.placement.held(layer.index, layer.shape.num_experts)
        return expert < layer.shape.num_experts and expert not in held

    def pass_over(self, name: str, expert: int) -> None:
        """Notes that an expert's share of a stack is in the checkpoint, and for another rank to read."""
        path, _, last = name.rpartition(".")
        self.missing[path].discard((last, expert))
        self._read += math.prod(_shape(self.layers[path], last))

    def put(self, name: str, weight: Tensor | LazyTensor, first: int | None = None) -> None:
        """Stores what was read under a parameter's name: a linear layer's weight, the matrix [1, ...] of expert
        `first`, or a stack of all experts' [E, ...], which may be unread. What does not fit is noted in `problems`."""
        path, _, last = name.rpartition(".")
        if path in self.quantization_config.done:
            return
        if isinstance(weight, LazyTensor) and path in self.layers:
            self._put_mxfp4(name, weight)
            return
        if isinstance(weight, LazyTensor):
            if self._keep_linear(path, weight.stored):
                return
            weight = weight.read()
        self._note_read(weight.numel())
        if path in self.linears:
            self._put_linear(path, weight)
            return
        layer, bank = self.layers[path], self._bank(path)
        expected = _shape(layer, last)
        experts = range(layer.shape.num_experts) if first is None else range(first, first + 1)
        if first is not None and first >= layer.shape.num_experts:
            self.problems.append(f"unexpected expert {first} for {name}, which has {layer.shape.num_experts}")
        elif tuple(weight.shape) != (len(experts), *expected):
            found = f"{[*weight.shape]}, not {[len(experts), *expected]}"
            self.problems.append(f"{name} is {found}" if first is None else f"{name} of expert {first} is {found}")
        else:
            for expert, matrix in zip(experts, weight, strict=True):
                bank.put_(expert, matrix_of(last), out_in(layer, last, matrix))
        self.missing[path] -= {(last, expert) for expert in experts}
        self._let_go_if_full(path)

    def keep(self, name: str, expert: int, pieces: list[LazyTensor]) -> bool:
        """Stores an expert's share of a stack as the checkpoint has it packed, unless it trains, or is to be packed
        otherwise: gate and up apart, or down."""
        path, _, last = name.rpartition(".")
        bank, matrix = self._bank(path), matrix_of(last)
        if expert not in bank.frozen_slots or matrix.endswith("_bias"):
            return False
        stack = bank.gate_up if matrix == "gate_up" else bank.down
        shape = (stack.shape[0] // stack.pieces, stack.shape[1])
        if len(pieces) != stack.pieces or not all(self._is_kept(one.stored, shape) for one in pieces):
            return False
        bank.put_quantized_(expert, matrix, *(cast(BitsAndBytes, one.stored).packed() for one in pieces))
        self._note_expert(path, last, expert)
        return True

    def _is_kept(self, stored: Stored, shape: tuple[int, ...]) -> bool:
        config = self.quantization_config.model
        return (
            isinstance(stored, BitsAndBytes)
            and config.base == "nf4"
            and stored.shape == shape
            and stored.is_nf4(double_quant=config.double_quant)
        )

    def _keep_linear(self, path: str, stored: Stored) -> bool:
        if not self._is_kept(stored, tuple(cast(nn.Linear, self._model.get_submodule(path)).weight.shape)):
            return False
        keep_4bit(self._model, path, cast(BitsAndBytes, stored).stored(), self.dtype, self.device)
        self._mark_initialized(path)
        self._note_read(stored.numel)
        return True

    def _put_mxfp4(self, name: str, stack: LazyTensor) -> None:
        """Stores a stack of experts that are published in MXFP4: each as it is, unless it trains, or is to be packed
        otherwise."""
        path, _, last = name.rpartition(".")
        layer, stored = self.layers[path], stack.stored
        assert isinstance(stored, Mxfp4)
        expected = (layer.shape.num_experts, *_shape(layer, last))
        if stored.shape != expected or not layer.shape.is_transposed:
            turned = "" if layer.shape.is_transposed else ", and [experts, in, out] is gpt-oss' layout of MXFP4"
            self.problems.append(f"{name} is {[*stored.shape]}, not {[*expected]}{turned}")
            self.missing[path] -= {(last, expert) for expert in range(layer.shape.num_experts)}
            return
        bank, matrix = self._bank(path), matrix_of(last)
        for expert in range(layer.shape.num_experts):
            if expert in bank.frozen_slots and self.quantization_config.model.base == "mxfp4":
                bank.put_quantized_(expert, matrix, stored.packed(expert))
                self._note_expert(path, last, expert)
            elif expert in bank.held:
                self.put(name, stored.rows(expert, expert + 1, stack.device), expert)
            else:
                self.pass_over(name, expert)

    def _note_expert(self, path: str, last: str, expert: int) -> None:
        self._note_read(math.prod(_shape(self.layers[path], last)))
        self.missing[path].discard((last, expert))
        self._let_go_if_full(path)

    def _note_read(self, weights: int) -> None:
        self._read += weights
        if self.quantization_config.on_read is not None:
            self.quantization_config.on_read(self._read / self._all)

    def _let_go_if_full(self, path: str) -> None:
        if not self.missing[path] and not self.problems and self.quantization_config.on_bank is not None:
            bank = self._bank(path)
            self.quantization_config.on_bank(path, bank)
            bank.to("meta")

    def _bank(self, path: str) -> ExpertBank:
        if path not in self.banks:
            config = self.quantization_config
            experts, layer = self._model.get_submodule(path), self.layers[path]
            self.banks[path] = make_bank(
                experts, layer, config.selection, config.model, self.dtype, self.device, config.placement, self.context
            )
        return self.banks[path]

    def _put_linear(self, path: str, weight: Tensor) -> None:
        linear: Any = self._model.get_submodule(path)
        if linear.weight.shape != weight.shape:
            self.problems.append(f"{path}.weight is {[*weight.shape]}, not {[*linear.weight.shape]}")
            return
        linear.weight = nn.Parameter(weight, requires_grad=False)
        quantize_linear(self._model, path, self.quantization_config.model, self.dtype, self.device)
        self._mark_initialized(path)

    def _mark_initialized(self, path: str) -> None:
        for module in self._model.get_submodule(path).modules():
            mark_initialized(module)  # or transformers would draw it anew

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for path, missing in self.missing.items():
            self.problems += [f"missing {path}.{name} of expert {expert}" for name, expert in sorted(missing)]
        if self.problems:
            raise UserError(f"the checkpoint does not fit {type(model).__name__}: {'; '.join(self.problems[:10])}")
        for path, layer in self.layers.items():
            if path not in self.quantization_config.done:
                install_bank(model, layer, self._bank(path))
        if self.quantization_config.on_read is not None:
            self.quantization_config.on_read(1.0)  # what is not packed has been read too
        return model


def _shape(layer: MoeLayer, stack: str) -> tuple[int, ...]:
    """Of one expert's share of a stack, as the model has it."""
    shape = layer.shape
    rows = shape.intermediate * (2 if shape.has_gate else 1)
    out, into = (shape.hidden, shape.intermediate) if stack.startswith("down") else (rows, shape.hidden)
    if stack.endswith("bias"):
        return (out,)
    return (into, out) if shape.is_transposed else (out, into)


class _Pack(ConversionOps):
    """Packs a weight that has arrived whole, and hands nothing on to transformers."""

    def __init__(self, quantizer: MoetuneQuantizer) -> None:
        self.quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        for name, tensors in input_dict.items():
            self.quantizer.put(name, tensors[0] if isinstance(tensors, list) else tensors)
            kwargs["missing_keys"].discard(name)
        return {}


class _ExpertByExpert(WeightConverter):
    """A conversion that merges experts into a stack, run on one expert at a time."""

    __slots__ = ("keys",)
    keys: dict[str, list[str]]

    @classmethod
    def of(cls, conversion: WeightConverter) -> _ExpertByExpert:
        sources, targets = list(conversion._original_source_patterns), list(conversion._original_target_patterns)
        made = cls(sources, targets, operations=conversion.operations)
        made.scope_prefix, made.base_model_prefix = conversion.scope_prefix, conversion.base_model_prefix
        made.keys = {}
        return made

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        super().add_tensor(target_key, source_key, source_pattern, future)
        self.keys.setdefault(source_pattern, []).append(source_key)

    def convert(
        self, layer_name: str, model: Any = None, config: Any = None, hf_quantizer: Any = None, loading_info: Any = None
    ) -> dict[str, Any]:
        collected, self.collected_tensors = self.collected_tensors, {}
        self.quantization_operation = None
        if layer_name.rpartition(".")[0] in hf_quantizer.quantization_config.done:
            collected = {}  # nothing has been read yet
        for expert, tensors in self._by_expert(collected).items():
            if len(tensors) < len(self.source_patterns):
                continue  # put() never sees it, so it stays among what is missing
            if hf_quantizer.is_elsewhere(layer_name.rpartition(".")[0], expert):
                hf_quantizer.pass_over(layer_name, expert)
                continue
            read: dict[str, list[Any]] = {pattern: [one() for one in those] for pattern, those in tensors.items()}
            pieces = [one for pattern in self.source_patterns for one in read[pattern]]
            if all(isinstance(one, LazyTensor) for one in pieces):
                if self._only_merges() and hf_quantizer.keep(layer_name, expert, pieces):
                    continue
                read = {pattern: [one.read() for one in those] for pattern, those in read.items()}
            self.collected_tensors = read
            del pieces, read  # what is merged is let go
            try:
                merged = super().convert(layer_name, model, config, None, loading_info)
            except SkipParameters:  # an operation failed: its parts do not fit together
                reason = loading_info.conversion_errors.pop(layer_name).strip().splitlines()
                hf_quantizer.problems.append(f"{layer_name}, expert {expert}: {reason[-2]}")
                continue
            for name, tensor in merged.items():
                hf_quantizer.put(name, tensor[0] if isinstance(tensor, list) else tensor, expert)
        loading_info.missing_keys.discard(layer_name)
        return {}

    def _only_merges(self) -> bool:
        return all(isinstance(operation, (MergeModulelist, Concatenate)) for operation in self.operations)

    def _by_expert(self, collected: dict[str, list[Any]]) -> dict[int, dict[str, list[Any]]]:
        """Each expert's tensors, not yet read, by pattern."""
        experts: dict[int, dict[str, list[Any]]] = {}
        for pattern, futures in collected.items():
            for key, future in zip(self.keys[pattern], futures, strict=True):
                expert = int(re.findall(r"\.(\d+)\.", key)[-1])
                experts.setdefault(expert, {})[pattern] = [future]
        return experts


def merges_experts(model_type: str) -> bool:
    """Whether checkpoints of this type hold experts one by one, and transformers merges them."""
    conversions = get_checkpoint_conversion_mapping(model_type) or []
    return any(isinstance(c, WeightConverter) and _is_of_experts(c) for c in conversions)


def _is_of_experts(conversion: WeightConverter) -> bool:
    return all(t.rpartition(".")[2] in STACKS for t in conversion.target_patterns) and all(
        "*" in source for source in conversion.source_patterns
    )
