"""Checkpoint key mappings: of which tensors of a checkpoint each parameter of a model is made, and how.

transformers loads a checkpoint by renaming its tensors and merging some (an expert's w1 and w3 into rows of
`gate_up_proj`). The same rules rename every tensor of the checkpoint at hand here, so the names that come out are the
checkpoint's own, in any layout that transformers reads; and values are written back by the reversed operations, one
expert at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from moetune.errors import UserError

STACKS = ("gate_up_proj", "up_proj", "down_proj")
"""What transformers calls the stacks of a layer's experts."""


@dataclass(frozen=True)
class KeyMapping:
    """The checkpoint's tensors that one parameter is made of.

    Attributes:
        keys: source pattern of the conversion -> tensor names, in order. Without a conversion one name, under itself.
        conversion: how transformers merges them; None where the one tensor is the parameter as it is.
    """

    parameter: str
    model: PreTrainedModel = field(repr=False)
    keys: Mapping[str, list[str]]
    conversion: WeightConverter | None = None

    @property
    def has_experts_apart(self) -> bool:
        """Whether each expert has tensors of its own; else a stack holds them all along its first axis."""
        return self.parameter.rpartition(".")[2] in STACKS and all("*" in pattern for pattern in self.keys)

    @property
    def only_merges(self) -> bool:
        """Whether an expert's tensors become its share of a stack one after the other, unchanged."""
        operations = () if self.conversion is None else self.conversion.operations
        return all(isinstance(operation, (MergeModulelist, Concatenate)) for operation in operations)

    @cached_property
    def experts(self) -> dict[int, KeyMapping]:
        """Expert -> the mapping of its share [1, ...] of the parameter, where the experts are apart."""
        found: dict[int, dict[str, list[str]]] = {}
        for pattern, keys in self.keys.items():
            for key in keys:
                found.setdefault(int(re.findall(r"\.(\d+)\.", key)[-1]), {}).setdefault(pattern, []).append(key)
        return {expert: KeyMapping(self.parameter, self.model, of, self.conversion) for expert, of in found.items()}

    @property
    def is_whole(self) -> bool:
        """Whether every pattern of the conversion has a tensor."""
        return len(self.keys) == (1 if self.conversion is None else len(self.conversion.source_patterns))

    def of_expert(self, expert: int) -> KeyMapping:
        """The mapping of one expert's share: [1, ...] of the parameter where the experts are apart, else the whole."""
        if not self.has_experts_apart:
            return self
        found = self.experts.get(expert)
        if found is None or not found.is_whole:
            raise UserError(f"the checkpoint has no tensors for expert {expert} of {self.parameter}")
        return found

    def every_key(self) -> list[str]:
        return [key for keys in self.keys.values() for key in keys]

    def to_model(self, read: Callable[[str], Tensor]) -> Tensor:
        """Make the parameter (or one expert's share, [1, ...]) of the checkpoint's tensors.

        Args:
            read: the tensor of a name.
        """
        if self.conversion is None:
            return read(self.every_key()[0])
        merged = self._run(
            self.conversion, {pattern: [read(key) for key in keys] for pattern, keys in self.keys.items()}
        )
        if len(merged) > 1:
            return _only(merged[next(target for target in merged if target in self.parameter)])
        return _only(next(iter(merged.values())))

    def to_checkpoint(self, value: Tensor) -> dict[str, Tensor]:
        """The reverse of `to_model`: the checkpoint's tensors, by name, that a parameter's value becomes."""
        if self.conversion is None:
            return {self.every_key()[0]: value}
        backward = self.conversion.reverse_transform()
        split = self._run(backward, {backward.source_patterns[0]: [value]})
        by_source = [self.keys[pattern] for pattern in self.conversion.source_patterns]
        return {
            key: _only(split[target.replace("*", str(index))])
            for target, keys in zip(backward.target_patterns, by_source, strict=True)
            for index, key in enumerate(keys)
        }

    def _run(self, conversion: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        for operation in conversion.operations:
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
    """Parameter or buffer of the plain model -> its tensors among the checkpoint's tensor names `keys`.

    Args:
        model: as transformers builds it, on the meta device will do.
        split: include the parameters that are parts of one tensor of the checkpoint, for which `to_checkpoint` is not
            defined.
    """
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    conversions = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: conversion for conversion in conversions for pattern in conversion.source_patterns}
    known: Any = model.state_dict()
    mappings: dict[str, KeyMapping] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, conversions, model.base_model_prefix, known)
        if name not in known and key in known:
            name, pattern = key, None
        conversion = None if pattern is None else by_pattern[pattern]
        names = [name]
        if conversion is not None and len(conversion.target_patterns) > 1:
            first, *others = conversion.target_patterns
            names = [name, *(name.replace(first, other) for other in others)] if split else []
        for one in names:
            mapping = mappings.setdefault(one, KeyMapping(one, model, {}, conversion))
            assert isinstance(mapping.keys, dict)
            mapping.keys.setdefault(pattern or key, []).append(key)
    return {name: mapping for name, mapping in mappings.items() if mapping.is_whole}


ExpertLayout = Literal["apart", "rows", "converted"]
"""How a checkpoint holds a layer's experts: each in tensors of its own, which are merged; as rows of one tensor; or in
one tensor that is converted as a whole."""


def expert_layout(model_type: str) -> ExpertLayout:
    """The layout of experts in checkpoints of a type, as its authors publish them."""

    conversions = get_checkpoint_conversion_mapping(model_type) or []
    of_stacks = [
        conversion
        for conversion in conversions
        if isinstance(conversion, WeightConverter)
        and all(target.rpartition(".")[2] in STACKS for target in conversion.target_patterns)
    ]
    if not of_stacks:
        return "rows"
    return "apart" if any("*" in source for one in of_stacks for source in one.source_patterns) else "converted"


def _only(tensor: Any) -> Tensor:
    return tensor[0] if isinstance(tensor, list) else tensor
