"""Key mappings: the checkpoint tensors that make each model parameter, in both directions.

When transformers loads a checkpoint, it renames tensors and merges some (an expert's w1 and w3 into rows of
`gate_up_proj`). Here the same rules are applied to the tensor names of a given checkpoint, so every layout that
transformers reads is supported. Values are written back under the checkpoint's own names by the reverse operations, one
expert at a time.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ErnieFuseAndSplitTextVisionExperts,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from moetune.errors import UserError
from moetune.tensor_files import Stored

STACKS = ("gate_up_proj", "up_proj", "down_proj")
"""transformers' names of the parameters that hold all experts of a layer."""


@dataclass(frozen=True)
class KeyMapping:
    """The checkpoint tensors that one model parameter is made of, and how.

    Attributes:
        parameter: name of the parameter in `model`.
        keys: tensor-name pattern of the conversion (`experts.*.w1.weight`) -> names of the matching tensors, in order.
            Without a conversion, the one tensor name -> itself.
        conversion: transformers' rule that merges the tensors; None if the one tensor is the parameter unchanged.
    """

    parameter: str
    model: PreTrainedModel = field(repr=False)
    keys: Mapping[str, list[str]]
    conversion: WeightConverter | None = None

    @property
    def has_experts_apart(self) -> bool:
        """Whether the checkpoint has separate tensors for each expert, not all experts in rows of one tensor."""
        return self.parameter.rpartition(".")[2] in STACKS and all("*" in pattern for pattern in self.keys)

    @property
    def only_merges(self) -> bool:
        """Whether the conversion only stacks and concatenates tensors, without changing their values or layout."""
        operations = () if self.conversion is None else self.conversion.operations
        return all(isinstance(operation, (MergeModulelist, Concatenate)) for operation in operations)

    @property
    def only_joins_rows(self) -> bool:
        """Whether the parameter's rows are those of the checkpoint's tensors, one after the other."""
        operations = () if self.conversion is None else self.conversion.operations
        return len(self.keys) == 1 and all(type(x) is Concatenate and x.dim == 0 for x in operations)

    @property
    def only_transposes(self) -> bool:
        """Whether the parameter is one tensor of the checkpoint, as it is or transposed."""
        operations = () if self.conversion is None else self.conversion.operations
        return len(self.every_key()) == 1 and all(isinstance(operation, Transpose) for operation in operations)

    @cached_property
    def experts(self) -> "dict[int, KeyMapping]":
        """Expert id -> mapping of this expert's share [1, ...] of the parameter; only if `has_experts_apart`."""
        by_expert: dict[int, dict[str, list[str]]] = {}
        for pattern, keys in self.keys.items():
            for key in keys:
                by_expert.setdefault(int(re.findall(r"\.(\d+)\.", key)[-1]), {}).setdefault(pattern, []).append(key)
        return {expert: KeyMapping(self.parameter, self.model, of, self.conversion) for expert, of in by_expert.items()}

    @property
    def is_whole(self) -> bool:
        """Whether the checkpoint has tensors for every pattern of the conversion."""
        return len(self.keys) == (1 if self.conversion is None else len(self.conversion.source_patterns))

    def of_expert(self, expert: int) -> "KeyMapping":
        """Return the mapping of one expert's share [1, ...] of the parameter; `self` unless `has_experts_apart`.

        Raises `UserError` if the checkpoint does not have all tensors of this expert.
        """
        if not self.has_experts_apart:
            return self
        mapping = self.experts.get(expert)
        if mapping is None or not mapping.is_whole:
            raise UserError(f"the checkpoint has no tensors for expert {expert} of {self.parameter}")
        return mapping

    def every_key(self) -> list[str]:
        """Return the names of all checkpoint tensors of the parameter."""
        return [key for keys in self.keys.values() for key in keys]

    def to_model(self, read: Callable[[str], Tensor]) -> Tensor:
        """Return the parameter's value, computed from the checkpoint's tensors, which `read` returns by name.

        For the mapping of one expert (`of_expert`), the value is [1, ...].
        """
        if self.conversion is None:
            return read(self.every_key()[0])
        tensors = {pattern: [read(key) for key in keys] for pattern, keys in self.keys.items()}
        merged = self._run(self.conversion, tensors, lambda: self.model.get_parameter(self.parameter).shape)
        if len(merged) > 1:
            return _only(merged[next(target for target in merged if target in self.parameter)])
        return _only(next(iter(merged.values())))

    def to_checkpoint(self, value: Tensor, base: Mapping[str, Stored] | None = None) -> dict[str, Tensor]:
        """Convert a parameter's value back, the reverse of `to_model`: return checkpoint tensor name -> value.

        `base` are the checkpoint's tensors, needed where only their shapes say whether they are transposed.
        """
        if self.conversion is None:
            return {self.every_key()[0]: value}
        backward = self.conversion.reverse_transform()
        key = self.every_key()[0]
        split = self._run(backward, {backward.source_patterns[0]: [value]}, lambda: (base or {})[key].shape)
        by_source = [self.keys[pattern] for pattern in self.conversion.source_patterns]
        return {
            key: _only(split[target.replace("*", str(index))])
            for target, keys in zip(backward.target_patterns, by_source, strict=True)
            for index, key in enumerate(keys)
        }

    def _run(self, conversion: Any, tensors: dict[str, Any], shape: Callable[[], Sequence[int]]) -> dict[str, Any]:
        """Apply a conversion's operations in order to `tensors`: pattern of names -> the tensors of matching names.

        `shape` returns the shape of the whole result, which is needed by operations that may transpose. Returns pattern
        of names after the conversion -> tensor, or list of one tensor.
        """
        for operation in conversion.operations:
            if isinstance(operation, Transpose) and operation.check_dims:  # it compares whole tensors, not slices
                is_right = tuple(_only(next(iter(tensors.values()))).shape[1:]) == tuple(shape()[1:])
                operation = Transpose(0, 0) if is_right else Transpose(operation.dim0, operation.dim1)
            tensors = operation.convert(
                tensors,
                source_patterns=conversion.source_patterns,
                target_patterns=conversion.target_patterns,
                full_layer_name=self.parameter,
                model=self.model,
                config=self.model.config,
                missing_keys=None,
            )
        return tensors


def key_mappings(model: PreTrainedModel, keys: Iterable[str], *, split: bool = False) -> dict[str, KeyMapping]:
    """Return name -> mapping for each parameter or buffer of which the checkpoint has every tensor.

    `keys` are the names of all tensors of the checkpoint. With `split`, parameters that are only a part of a checkpoint
    tensor are included; `to_checkpoint` is not defined for them.
    """
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    conversions = [_without_split(rule) for rule in rules if isinstance(rule, WeightConverter)]
    split_lists = {
        pattern: rule.target_patterns for rule in rules if _splits_list(rule) for pattern in rule.source_patterns
    }
    by_pattern = {pattern: conversion for conversion in conversions for pattern in conversion.source_patterns}
    known: Any = model.state_dict()
    mappings: dict[str, KeyMapping] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, conversions, model.base_model_prefix, known)
        if name not in known and key in known:
            name, pattern = key, None
        conversion = None if pattern is None else by_pattern[pattern]
        names = [name]
        if pattern in split_lists and name in known:
            text, vision = split_lists[pattern]
            is_text = int(re.findall(r"\.(\d+)\.", key)[-1]) < len(known[name])
            names = [name if is_text else name.replace(text, vision)]
        elif conversion is not None and len(conversion.target_patterns) > 1:
            first, *rest = conversion.target_patterns
            names = [name, *(name.replace(first, target) for target in rest)] if split else []
        for parameter in names:
            mapping = mappings.setdefault(parameter, KeyMapping(parameter, model, {}, conversion))
            assert isinstance(mapping.keys, dict)
            mapping.keys.setdefault(pattern or key, []).append(key)
    return {name: mapping for name, mapping in mappings.items() if mapping.is_whole}


def renamed_again(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """Return those of a model's own names that the rules for names of its checkpoints rename too, as Laguna's do."""
    renamings = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    return {name for name in names if rename_source_key(name, renamings, [])[0] != name}


def _splits_list(rule: Any) -> bool:
    """Return whether a conversion rule makes two stacks of one list of experts: the first of them are for text, the
    others for images."""
    return any(isinstance(op, ErnieFuseAndSplitTextVisionExperts) for op in getattr(rule, "operations", ()))


def _without_split(rule: WeightConverter) -> WeightConverter:
    """Return a conversion that makes the stack for text alone if `rule` splits a list of experts; else `rule`."""
    if not _splits_list(rule):
        return rule
    operations = [MergeModulelist(dim=0), Concatenate(dim=1)][: len(rule.source_patterns)]
    return WeightConverter(rule.source_patterns, rule.target_patterns[0], operations)


def published_names(model: PreTrainedModel) -> list[str]:
    """Return the sorted tensor names of a published checkpoint of this model; `UserError` if they depend on one."""
    return sorted(published_tensors(model))


def published_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return name -> tensor of a published checkpoint of this model, as transformers would save it.

    `model` may be on the meta device; no checkpoint is needed. Raises `UserError` if the names depend on one.
    """
    try:
        return revert_weight_conversion(model, dict(model.state_dict()))
    except ValueError as error:  # the published tensors hold dropped modules too, as those of ERNIE-4.5-VL do
        raise UserError(
            f"the tensor names of {model.config.model_type!r} follow from a checkpoint only; give its folder: {error}"
        ) from error


@lru_cache(maxsize=2)  # asked for by each run of a plan
def published_paths(model: PreTrainedModel, linears: tuple[str, ...], experts: tuple[str, ...]) -> dict[str, list[str]]:
    """Return path of a linear layer -> its paths in published checkpoints, its own among them; and path of a layer's
    experts -> the paths of the first expert's matrices, or of the stacks that hold all experts.

    `model` may be on the meta device.
    """
    before = "model.language_model.", "language_model.model."  # the second before transformers 4.52
    paths = {path: [path, path.replace(*before)] for path in linears} | {path: [path] for path in experts}
    weights = {id(tensor): (path, tensor) for path in linears for tensor in [model.get_parameter(f"{path}.weight")]}
    with suppress(ValueError):  # the names follow from a checkpoint
        renamed = revert_weight_conversion(model, {f"{path}.weight": tensor for path, tensor in weights.values()})
        for name, tensor in renamed.items():
            if id(tensor) in weights:
                paths[weights[id(tensor)][0]].append(name.removesuffix(".weight"))
        for path in experts:
            named = model.get_submodule(path).named_parameters(recurse=False)
            first = {f"{path}.{name}": tensor.detach()[:1] for name, tensor in named if name in STACKS}
            paths[path] = [name.removesuffix(".weight") for name in revert_weight_conversion(model, first)]
    return paths


ExpertLayout = Literal["apart", "rows", "converted"]
"""How a checkpoint stores a layer's experts.

`apart`: in separate tensors for each expert; `rows`: as rows of one tensor, which is the parameter; `converted`: in one
tensor that is converted as a whole.
"""


def expert_layout(model_type: str) -> ExpertLayout:
    """Return how published checkpoints of a model type store a layer's experts, by transformers' conversion rules.

    `apart`: in separate tensors for each expert; `rows`: in one tensor, which is the parameter; `converted`: in one
    tensor that is converted as a whole.
    """
    conversions = get_checkpoint_conversion_mapping(model_type) or []
    of_stacks = [
        conversion
        for conversion in conversions
        if isinstance(conversion, WeightConverter)
        and all(target.rpartition(".")[2] in STACKS for target in conversion.target_patterns)
    ]
    if not of_stacks:
        return "rows"
    return "apart" if any("*" in source for rule in of_stacks for source in rule.source_patterns) else "converted"


def _only(tensor: Any) -> Tensor:
    """Return the first tensor of a list, or the tensor itself."""
    return tensor[0] if isinstance(tensor, list) else tensor
