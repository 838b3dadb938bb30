"""Weights that are packed while they are read: a transformers quantizer.

transformers reads a checkpoint tensor by tensor, renames it, and where its own modules hold experts in one stack, merges
the experts' matrices first. Here each expert's matrices are read, packed into their bank and let go one by one, and each
linear layer when its weight arrives; so neither host nor GPU ever holds the model in 16 bit. What trains goes into its
bank in full.

    from transformers import AutoModelForCausalLM
    from moetune.adapt.quantizer import MoetuneConfig

    AutoModelForCausalLM.from_pretrained(folder, quantization_config=MoetuneConfig(base="nf4"), device_map="cuda")
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moetune.adapt.pack import install_bank, linears_to_pack, make_bank, out_in, pack_linear, part_of, stacks
from moetune.anatomy.anatomy import Anatomy, read_anatomy
from moetune.anatomy.moe import MoeLayer
from moetune.anatomy.selection import Selection
from moetune.config import ModelConfig
from moetune.errors import UserError

METHOD = "moetune"


@register_quantization_config(METHOD)
class MoetuneConfig(QuantizationConfigMixin):
    """How a model is stored: `quantization_config=` of `from_pretrained`.

    Args:
        base: precision of what stays frozen, as `model.base` of a run file.
        double_quant: as `model.double_quant`.
        selection: what trains, and so is not packed; nothing by default. Not part of the saved configuration.
    """

    def __init__(
        self,
        base: str = "nf4",
        double_quant: bool = True,
        selection: Selection | None = None,
        **kwargs: Any,
    ) -> None:
        self.quant_method = METHOD
        self.model = ModelConfig.model_validate({"path": "unread", "base": base, "double_quant": double_quant})
        self.selection = selection or Selection(frozenset(), {}, {}, (), None)

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": METHOD, "base": self.model.base, "double_quant": self.model.double_quant}


@register_quantizer(METHOD)
class MoetuneQuantizer(HfQuantizer):
    """Packs a model as it is loaded.

    Attributes:
        read: bytes read of what is packed; `on_read` is told each increase.
    """

    quantization_config: MoetuneConfig
    on_read: Callable[[int], None] | None = None

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
        config, selection = self.quantization_config.model, self.quantization_config.selection
        device = torch.device((device_map or {}).get("", "cpu"))
        dtype = model.config.dtype
        self.anatomy: Anatomy = read_anatomy(model)
        self.problems: list[str] = []
        self._model, self.device, self.dtype = model, device, dtype
        self.linears = set(linears_to_pack(model, self.anatomy, selection))
        self.layers = {layer.experts: layer for layer in self.anatomy.moe_layers}
        with device:  # transformers calls this where new tensors are meta ones
            self.banks = {
                path: make_bank(model.get_submodule(path), layer, selection, config, dtype, device)
                for path, layer in self.layers.items()
            }
        self.missing = {(path, name, expert) for path, layer in self.layers.items() for name in stacks(layer)
                        for expert in range(layer.shape.num_experts)}  # fmt: skip

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        path, _, name = param_name.rpartition(".")
        return (path in self.linears and name == "weight") or (
            path in self.layers and name in stacks(self.layers[path])
        )

    def get_quantize_ops(self) -> ConversionOps:
        return _Pack(self)

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        names = {name for layer in self.layers.values() for name in stacks(layer)}
        updated = []
        for conversion in weight_conversions:
            if isinstance(conversion, WeightConverter) and _merges_experts(conversion, names):
                conversion = _ExpertByExpert.of(conversion)
            updated.append(conversion)
        return updated

    def put(self, name: str, weight: Tensor, first: int | None = None) -> None:
        """Stores what was read under a parameter's name: a linear layer's weight, one expert's matrix [1, ...], or a stack
        of all experts' [E, ...].

        Raises:
            UserError: the tensor has another shape than the model's.
        """
        path, _, last = name.rpartition(".")
        if self.on_read is not None:
            self.on_read(weight.nbytes)
        if path in self.linears:
            self._put_linear(path, weight)
            return
        layer, bank = self.layers[path], self.banks[path]
        expected = _shape(layer, last)
        experts = range(layer.shape.num_experts) if first is None else range(first, first + 1)
        if tuple(weight.shape) != (len(experts), *expected):
            raise UserError(
                f"{name}: the checkpoint has {list(weight.shape[1:])} for {len(weight)} experts, the model "
                f"{list(expected)} for {len(experts)}"
            )
        for expert, matrix in zip(experts, weight, strict=True):
            bank.put_(expert, part_of(last), out_in(layer, last, matrix))
            self.missing.discard((path, last, expert))

    def _put_linear(self, path: str, weight: Tensor) -> None:
        linear = self._model.get_submodule(path)
        if linear.weight.shape != weight.shape:
            raise UserError(f"{path}.weight: the checkpoint has {[*weight.shape]}, the model {[*linear.weight.shape]}")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        config = self.quantization_config.model
        pack_linear(self._model, path, config, self.dtype, self.device)
        for tensor in self._model.get_submodule(path).parameters():
            tensor._is_hf_initialized = True

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        lacking = [f"the checkpoint lacks {path}.{name} of expert {n}" for path, name, n in sorted(self.missing)]
        if problems := self.problems or lacking:
            raise UserError("\n".join(problems[:10]))
        for path, bank in self.banks.items():
            install_bank(model, self.layers[path], bank)
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
        self, input_dict: dict[str, Any], *, model: Any = None, missing_keys: set[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        for name, tensors in input_dict.items():
            try:
                self.quantizer.put(name, tensors[0] if isinstance(tensors, list) else tensors)
            except UserError as error:  # raised here, it would be logged only
                self.quantizer.problems.append(str(error))
            if missing_keys is not None:
                missing_keys.discard(name)
        return {}


class _ExpertByExpert(WeightConverter):
    """A conversion that merges experts into a stack, run on one expert at a time."""

    __slots__ = ("keys",)

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
        operation, self.quantization_operation = self.quantization_operation, None
        assert isinstance(operation, _Pack)
        for expert, tensors in self._by_expert(collected):
            self.collected_tensors = tensors
            merged = super().convert(layer_name, model, config, None, loading_info)
            for name, tensor in merged.items():
                operation.quantizer.put(name, tensor[0] if isinstance(tensor, list) else tensor, expert)
                loading_info.missing_keys.discard(name)
        return {}

    def _by_expert(self, collected: dict[str, list[Any]]) -> Iterator[tuple[int, dict[str, list[Any]]]]:
        """Each expert's tensors, not yet read, by pattern."""
        experts: dict[int, dict[str, list[Any]]] = {}
        for pattern, futures in collected.items():
            for key, future in zip(self.keys[pattern], futures, strict=True):
                found = re.findall(r"\.(\d+)\.", key)
                experts.setdefault(int(found[-1]), {})[pattern] = [future]
        for expert in sorted(experts):
            lacking = [pattern for pattern in self.source_patterns if pattern not in experts[expert]]
            if lacking:
                raise UserError(
                    f"the checkpoint lacks {lacking[0].replace('*', str(expert))} of {next(iter(self.keys))}"
                )
            yield expert, experts[expert]


def _merges_experts(conversion: WeightConverter, stacks: set[str]) -> bool:
    return all(t.rpartition(".")[2] in stacks for t in conversion.target_patterns) and all(
        "*" in source for source in conversion.source_patterns
    )
