"""Where a checkpoint keeps each parameter of a model, and how its values lie there.

transformers loads a checkpoint by renaming its tensors and merging some (an expert's w1 and w3 into rows of
`gate_up_proj`). Here every tensor of the checkpoint at hand is renamed with those same rules, so the names that come
out are the checkpoint's own, whichever of the layouts that transformers reads it has; and values go back by the
reversed operations, one expert at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

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

    def of_expert(self, expert: int) -> KeyMapping:
        """The home of one expert's share [1, ...] of the parameter."""
        if not self.has_experts_apart:
            return self
        chosen = {pattern: [key for key in keys if _expert_of(key) == expert] for pattern, keys in self.keys.items()}
        if any(len(keys) != 1 for keys in chosen.values()):
            raise UserError(f"the checkpoint has no tensors for expert {expert} of {self.parameter}")
        return KeyMapping(self.parameter, self.model, chosen, self.conversion)

    def every_key(self) -> list[str]:
        return [key for keys in self.keys.values() for key in keys]

    def to_model(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """What the checkpoint's tensors, by name, make of the parameter (or of one expert's share, [1, ...])."""
        if self.conversion is None:
            return tensors[self.every_key()[0]]
        collected = {pattern: [tensors[key] for key in keys] for pattern, keys in self.keys.items()}
        merged = self._run(self.conversion, collected)
        assert len(merged) == 1, merged.keys()
        return _only(next(iter(merged.values())))

    def to_checkpoint(self, value: Tensor) -> dict[str, Tensor]:
        """The reverse of `to_model`: the checkpoint's tensors, by name, that a parameter's value becomes."""
        if self.conversion is None:
            return {self.every_key()[0]: value}
        backward = self.conversion.reverse_transform()
        split = self._run(backward, {backward.source_patterns[0]: [value]})
        return {
            key: _only(split[target.replace("*", str(index))])
            for target, keys in zip(backward.target_patterns, self._by_source(), strict=True)
            for index, key in enumerate(keys)
        }

    def _by_source(self) -> list[list[str]]:
        assert self.conversion is not None
        return [self.keys[pattern] for pattern in self.conversion.source_patterns]

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


def find_homes(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, KeyMapping]:
    """Parameter or buffer of the plain model -> its home among the checkpoint's tensor names `keys`.

    Args:
        model: as transformers builds it, on the meta device will do.
    """
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    conversions = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: conversion for conversion in conversions for pattern in conversion.source_patterns}
    known: Any = model.state_dict()
    homes: dict[str, KeyMapping] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, conversions, model.base_model_prefix, known)
        if name not in known and key in known:
            name, pattern = key, None
        conversion = None if pattern is None else by_pattern[pattern]
        if conversion is not None and len(conversion.target_patterns) > 1:
            continue  # one tensor that becomes several parameters: `home_of` has no answer for those
        home = homes.setdefault(name, KeyMapping(name, model, {}, conversion))
        assert isinstance(home.keys, dict)
        home.keys.setdefault(pattern or key, []).append(key)
    return {name: home for name, home in homes.items() if _is_whole(home)}


def _is_whole(home: KeyMapping) -> bool:
    if home.conversion is None:
        return len(home.keys) == 1
    return home.keys.keys() == set(home.conversion.source_patterns)


def _expert_of(key: str) -> int:
    return int(re.findall(r"\.(\d+)\.", key)[-1])


def _only(tensor: Any) -> Tensor:
    return tensor[0] if isinstance(tensor, list) else tensor
