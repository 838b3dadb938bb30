"""A delta read into an adapted model: tensors under the checkpoint's names become the parameters that train.

Every tensor of the delta must be part of something that trains. What trains and is not in the delta begins as without
one: with the base's values, and LoRA with none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moetune.adapt.build import Adapted
from moetune.adapt.weights.target import out_in
from moetune.errors import UserError
from moetune.models.hub.delta_folder import Delta
from moetune.models.hub.names import KeyMapping, key_mappings
from moetune.models.hub.quantized import weights_of
from moetune.models.hub.tensor_files import Stored
from moetune.models.moe import MoeLayer
from moetune.run.names import stacks, trained_name, whole_name

_MOST_PROBLEMS = 10

Rows = Callable[[Stored, int, int | None], Tensor]
"""Reads rows of a tensor of the delta."""


@dataclass(frozen=True)
class _Landing:
    """A trained parameter, and the tensors of the delta that it is made of.

    Attributes:
        home: those tensors; for an expert of a stack, the tensors that have its rows.
        expert, layer, stack: whose share of which stack; None for all of a parameter.
        delta: the rows that are to be read are looked up in its slices.
    """

    parameter: str
    home: KeyMapping
    delta: Delta
    expert: int | None = None
    layer: MoeLayer | None = None
    stack: str = ""

    @property
    def is_sliced(self) -> bool:
        return self.expert is not None and not self.home.has_experts_apart

    def pieces(self) -> list[tuple[str, int | None]]:
        """Each tensor it needs, with the row where it is one of a stack's; None for all rows, -1 for one not there."""
        found: list[tuple[str, int | None]] = []
        for key in self.home.every_key():
            row: int | None = None
            if key not in self.delta.tensors:
                row = -1
            elif self.is_sliced:
                experts = self.delta.slices.get(key, range(self.delta.tensors[key].num_rows))
                row = list(experts).index(self.expert) if self.expert is not None and self.expert in experts else -1
            found.append((key, row))
        return found

    def value(self, read: Rows) -> Tensor:
        tensors = {}
        for key, row in self.pieces():
            stored = self.delta.tensors[key]
            tensors[key] = read(stored, 0, None).reshape(stored.shape) if row is None else read(stored, row, row + 1)
        value = self.home.to_model(tensors.__getitem__)
        if self.layer is None:
            return value
        return out_in(self.layer, self.stack, value[0])


def check_delta(adapted: Adapted, delta: Delta) -> None:
    """Checks names and shapes; reads no weights.

    Args:
        adapted: on the meta device will do.

    Raises:
        UserError: the delta has a tensor that nothing which trains is made of, or only a part of what one is made of,
            or another shape.
    """
    landings, problems = _landings(adapted, delta)
    trainable = adapted.learned()
    for landing in landings:
        expected = trainable[landing.parameter].shape
        try:
            found = landing.value(_nothing).shape
        except (RuntimeError, IndexError, ValueError):  # its parts do not fit together
            problems.append(f"{landing.home.every_key()[0]} and what belongs with it do not make {landing.parameter}")
            continue
        if found != expected:
            problems.append(f"{landing.parameter} is {[*found]} in the delta, and {[*expected]} here")
    if problems:
        shown = problems[:_MOST_PROBLEMS]
        more = [f"and {len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
        raise UserError(
            f"the delta in {str(delta.folder)!r} does not fit the run's adapt: block:\n  " + "\n  ".join(shown + more)
        )


def load_delta(adapted: Adapted, delta: Delta) -> tuple[str, ...]:
    """Copies a delta that was checked into the model, a tensor at a time; says what it leaves as it was.

    Raises:
        UserError: it has two values for one parameter, under names that the model ties. Some are copied then.
    """
    check_delta(adapted, delta)
    landings, _ = _landings(adapted, delta)
    trainable, done = adapted.learned(), set()
    with torch.no_grad():
        for landing in landings:
            parameter = trainable[landing.parameter]
            value = landing.value(Stored.rows).to(parameter.device, parameter.dtype)
            if landing.parameter in done and not value.equal(parameter):
                raise UserError(f"{landing.home.every_key()[0]} differs from {landing.parameter}; the model ties them")
            parameter.copy_(value)
            done.add(landing.parameter)
    rest = sorted(name for name in trainable.keys() - done if adapted.part_of(name) != "lora")
    notes = []
    if rest:
        more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
        notes.append(f"not in the delta, and begins with the base's values: {rest[0]}{more}")
    if any(adapted.part_of(name) == "lora" for name in trainable):
        notes.append("a delta holds no LoRA; its factors begin anew")
    return tuple(notes)


def _landings(adapted: Adapted, delta: Delta) -> tuple[list[_Landing], list[str]]:
    """Where the delta's tensors go, and what of it goes nowhere or comes in part."""
    landings: list[_Landing] = []
    problems: list[str] = []
    landed: dict[str, set[int | None]] = {key: set() for key in delta.tensors}
    for landing in _possible(adapted, delta):
        pieces = landing.pieces()
        there = [(key, row) for key, row in pieces if row != -1]
        if there and len(there) < len(pieces):
            lacking = next(key for key, row in pieces if row == -1)
            problems.append(f"{landing.parameter} is made of {lacking} too, which is not in the delta")
        elif there:
            landings.append(landing)
        for key, row in there:
            landed[key].add(row)
    for key, rows in sorted(landed.items()):
        if None in rows:
            continue
        experts = delta.slices.get(key, range(delta.tensors[key].num_rows))
        lost = [expert for row, expert in enumerate(experts) if row not in rows]
        which = f" of expert {', '.join(map(str, lost))}" if rows or key in delta.slices else ""
        if lost:
            problems.append(f"{key}{which} is in the delta, and does not train here")
    return landings, problems


def _possible(adapted: Adapted, delta: Delta) -> Iterator[_Landing]:
    """A landing for each parameter that trains in full precision, under each name that the base has for it."""
    homes = key_mappings(adapted.run.model.plain, weights_of(delta.base.fingerprint.tensors))
    stacked: dict[str, tuple[MoeLayer, int, str]] = {}
    for layer in adapted.structure.moe_layers:
        for expert in adapted.selection.experts.get(layer.index, ()):
            for stack in stacks(layer):
                stacked[trained_name(layer, expert, stack)] = layer, expert, stack
    there = adapted.trainable().keys()
    for name in (name for name in stacked if name in there):
        layer, expert, stack = stacked[name]
        if (home := homes.get(f"{layer.experts}.{stack}")) is not None:
            yield _Landing(name, home.of_expert(expert), delta, expert, layer, stack)
    for name in adapted.run.router_biases.values():
        if name in homes:
            yield _Landing(name, homes[name], delta)
    for parameter in sorted(adapted.selection.full):
        tied = (other for other, first in adapted.structure.tied.items() if first == parameter)
        for other in (parameter, *tied):
            if other in homes:
                yield _Landing(whole_name(parameter, adapted.selection), homes[other], delta)


def _nothing(tensor: Stored, start: int, stop: int | None) -> Tensor:
    """Rows without contents, for their shape."""
    count = (tensor.num_rows if stop is None else stop) - start
    return torch.empty((count, *tensor.row_shape), dtype=tensor.torch_dtype, device="meta")
