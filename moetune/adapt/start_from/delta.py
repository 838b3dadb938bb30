"""Load a delta, full-precision weights under the base's tensor names, into an adapted model.

Every tensor of the delta must be needed for a parameter that trains. Parameters that train and are not in the delta
keep their initial values: the base model's, or freshly drawn LoRA factors.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from moetune.adapt.build import Adapted
from moetune.adapt.weights.target import out_in
from moetune.errors import UserError, first_of
from moetune.formats.checkpoint import weights_of
from moetune.models.hub.delta_folder import Delta
from moetune.models.hub.key_mapping import KeyMapping, key_mappings
from moetune.models.moe import MoeLayer
from moetune.run.names import stacks, trained_name, whole_name
from moetune.tensor_files import Stored

Rows = Callable[[Stored, int, int | None], Tensor]
"""Function of (tensor of a delta, first row, end) that returns these rows; an end of None stands for the last row."""


@dataclass(frozen=True)
class _Target:
    """A trained parameter, and the tensors of the delta that it is computed from.

    Attributes:
        parameter: name of the parameter in the adapted model.
        mapping: the tensors and their conversion; for an expert of a stack, the tensors that hold its rows.
        expert, layer: id and layer of the expert whose weights the parameter holds; None for a parameter of the plain
            model.
        stack: name of the parameter that holds all experts of the layer in the plain model, such as `down_proj`.
    """

    parameter: str
    mapping: KeyMapping
    expert: int | None = None
    layer: MoeLayer | None = None
    stack: str = ""

    def rows(self, delta: Delta) -> tuple[dict[str, int | None], list[str]]:
        """Return tensor name -> index of the row that is needed, None for all rows; and what the delta lacks."""
        of_stack = self.expert is not None and not self.mapping.has_experts_apart
        held: dict[str, int | None] = {}
        lacking = []
        for key in self.mapping.every_key():
            if key not in delta.tensors or (of_stack and self.expert not in _experts_in(delta, key)):
                lacking.append(key)
            else:
                held[key] = _experts_in(delta, key).index(cast(int, self.expert)) if of_stack else None
        return held, lacking

    def value(self, delta: Delta, read: Rows) -> Tensor:
        """Return the parameter's value, computed from the delta's tensors as when a checkpoint is loaded.

        `read` reads a tensor's rows (see `Rows`); with `_nothing` the value is on the meta device, to check shapes.
        The delta must have all that `rows` names. The result has the adapted model's layout ([out, in] for an expert's
        weight) and the delta's dtype. Raises `RuntimeError`, `IndexError` or `ValueError` if the tensors do not fit
        together.
        """
        rows, _ = self.rows(delta)

        def tensor(key: str) -> Tensor:
            stored, row = delta.tensors[key], rows[key]
            return read(stored, 0, None).reshape(stored.shape) if row is None else read(stored, row, row + 1)

        value = self.mapping.to_model(tensor)
        return value if self.layer is None else out_in(self.layer, self.stack, value[0])


def _experts_in(delta: Delta, key: str) -> list[int]:
    """Return the ids of the experts whose rows a tensor of the delta holds, in the order of the rows."""
    return list(delta.slices.get(key, range(delta.tensors[key].num_rows)))


def check_delta(adapted: Adapted, delta: Delta) -> None:
    """Raise `UserError` if a delta does not fit the parameters that train; compare names and shapes, read no weights.

    A delta does not fit if no trained parameter needs one of its tensors or an expert's row, if other tensors of the
    same parameter are missing from it, or if a shape differs.
    """
    targets, problems = _targets(adapted, delta)
    trainable = adapted.learned()
    for target in targets:
        expected = trainable[target.parameter].shape
        try:
            shape = target.value(delta, _nothing).shape
        except (RuntimeError, IndexError, ValueError):  # the tensors of the parameter do not fit together
            problems.append(
                f"{target.mapping.every_key()[0]} and the tensors that belong with it do not form {target.parameter}"
            )
            continue
        if shape != expected:
            problems.append(f"{target.parameter} is {[*shape]} in the delta, and {[*expected]} here")
    if problems:
        lines = "\n  ".join(first_of(problems))
        raise UserError(f"the delta in {str(delta.folder)!r} does not fit the run's adapt: block:\n  {lines}")


def load_delta(adapted: Adapted, delta: Delta) -> tuple[str, ...]:
    """Check a delta with `check_delta`, then copy its values into the model, one parameter at a time.

    Returns:
        Notes for the user on trained parameters that are not in the delta.

    Raises:
        UserError: the delta does not fit; or it has different values for two names that the model ties, in which case
            some parameters have been overwritten.
    """
    check_delta(adapted, delta)
    trainable, done = adapted.learned(), set()
    with torch.no_grad():
        for target in _targets(adapted, delta)[0]:
            parameter = trainable[target.parameter]
            value = target.value(delta, Stored.rows).to(parameter.device, parameter.dtype)
            if target.parameter in done and not value.equal(parameter):
                raise UserError(f"{target.mapping.every_key()[0]} differs from {target.parameter}; the model ties them")
            parameter.copy_(value)
            done.add(target.parameter)
    rest = sorted(name for name in trainable.keys() - done if adapted.part_of(name) != "lora")
    notes = []
    if rest:
        further = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
        notes.append(f"not in the delta, so it starts from the base's values: {rest[0]}{further}")
    if any(adapted.part_of(name) == "lora" for name in trainable):
        notes.append("a delta holds no LoRA; its factors are newly initialized")
    return tuple(notes)


def _targets(adapted: Adapted, delta: Delta) -> tuple[list[_Target], list[str]]:
    """Return the parameters that the delta has values for, and the problems found: tensors that no trained parameter
    needs, and parameters for which only some tensors are in the delta."""
    targets: list[_Target] = []
    problems: list[str] = []
    used: dict[str, set[int | None]] = {key: set() for key in delta.tensors}
    for target in _possible(adapted, delta):
        held, lacking = target.rows(delta)
        if held and lacking:
            problems.append(f"{target.parameter} also needs {lacking[0]}, which is not in the delta")
        elif held:
            targets.append(target)
        for key, row in held.items():
            used[key].add(row)
    for key, taken in sorted(used.items()):
        lost = [] if None in taken else [x for row, x in enumerate(_experts_in(delta, key)) if row not in taken]
        which = f" of expert {', '.join(map(str, lost))}" if taken or key in delta.slices else ""
        if lost:
            problems.append(f"{key}{which} is in the delta, but does not train in this run")
    return targets, problems


def _possible(adapted: Adapted, delta: Delta) -> Iterator[_Target]:
    """Yield a target for each parameter that trains in full precision, and one more for each name tied to it."""
    mappings = key_mappings(adapted.run.model.plain, weights_of(delta.base.fingerprint.tensors))
    trainable = adapted.trainable().keys()
    for layer in adapted.structure.moe_layers:
        for expert in adapted.selection.experts.get(layer.index, ()):
            for stack in stacks(layer):
                name, mapping = trained_name(layer, expert, stack), mappings.get(f"{layer.experts}.{stack}")
                if name in trainable and mapping is not None:
                    yield _Target(name, mapping.of_expert(expert), expert, layer, stack)
    for name in adapted.run.router_biases.values():
        if name in mappings:
            yield _Target(name, mappings[name])
    for parameter in sorted(adapted.selection.full):
        tied = (alias for alias, first in adapted.structure.tied.items() if first == parameter)
        for alias in (parameter, *tied):
            if alias in mappings:
                yield _Target(whole_name(parameter, adapted.selection), mappings[alias])


def _nothing(tensor: Stored, start: int, stop: int | None) -> Tensor:
    """Read nothing: a `Rows` function that returns tensors on the meta device, from which shapes can be computed."""
    count = (tensor.num_rows if stop is None else stop) - start
    return torch.empty((count, *tensor.row_shape), dtype=tensor.torch_dtype, device="meta")
