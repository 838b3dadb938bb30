"""`Update`: a trained parameter's new value, and the base checkpoint's tensors that store it.

Every trained parameter has an update, even one whose values equal the base's. The plain model is the one that
transformers builds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moetune.adapt.weights.target import out_in
from moetune.errors import UserError, note
from moetune.experts.bank import ExpertBank
from moetune.exporting.finished_run import FinishedRun
from moetune.formats.base import Quantized
from moetune.models.hub.key_mapping import KeyMapping, key_mappings
from moetune.models.structure import MoeLayer
from moetune.run.names import linear_factors, matrix_of, stacks, trained_name, whole_name
from moetune.run.resolved import ResolvedModel
from moetune.tensor_files import Held, Stored

Trained = Stored | Held
"""A trained tensor: in a checkpoint's file, or in memory."""


@dataclass(frozen=True)
class Update:
    """The new value of a parameter of the plain model, or of one expert's row of a parameter that stacks experts.

    Attributes:
        parameter: its name in the plain model.
        expert: the id of the expert; None if the whole parameter is updated.
        is_added: whether the new value is computed from the base's value, as for LoRA, instead of replacing it.
        reads: the trained tensors from which it is computed.
        rows: function (old, start, stop) -> the new rows start to stop - 1 in the plain model's layout; for an expert
            its one row [1, …]. `old` are the base's rows in float32, which it may overwrite; None if not `is_added`.
        dtype: the dtype of the new rows.
    """

    parameter: str
    expert: int | None
    is_added: bool
    reads: tuple[Trained, ...]
    rows: Callable[[Tensor | None, int, int], Tensor]
    dtype: torch.dtype = torch.float32


def updates(run: FinishedRun) -> list[Update]:
    """Return the updates of all trained parameters of a run. Tensors are read only when `Update.rows` is called."""
    adapted, trained, selection = run.adapted, run.trained, run.adapted.selection
    all_updates: list[Update] = []
    for layer in adapted.structure.moe_layers:
        bank = adapted.model.get_submodule(layer.experts)
        assert isinstance(bank, ExpertBank)
        all_updates += _of_bank(trained, layer, bank)
    for path in selection.lora_linears:
        assert selection.lora is not None
        A, B = (trained[name] for name in linear_factors(path).values())
        scale = selection.lora.scale(selection.ranks[path])
        all_updates.append(of_linear(path, A, B, scale))
    in_full = {name: whole_name(name, selection) for name in sorted(selection.full)}
    in_full |= {name: name for name in adapted.run.router_biases.values()}
    return all_updates + [of_whole(name, trained[checkpoint_name]) for name, checkpoint_name in in_full.items()]


def of_whole(name: str, stored: Trained) -> Update:
    """Return the update of a parameter whose whole value is replaced by `stored`."""
    return Update(name, None, False, (stored,), lambda old, *rows: stored.rows(*rows), stored.torch_dtype)


def of_linear(path: str, A: Trained, B: Trained, scale: float) -> Update:
    """Return the update W + scale · B · A of the weight of a linear layer, or of a router."""

    def rows(old: Tensor | None, start: int, stop: int) -> Tensor:
        assert old is not None
        return old + scale * B.rows(start, stop).float() @ A.rows().float()

    return Update(f"{path}.weight", None, True, (A, B), rows)


def _of_trained(layer: MoeLayer, stack: str, expert: int, stored: Trained) -> Update:
    """Return the update of an expert's matrix or bias that is replaced by `stored`, which is [out, in]."""

    def rows(*_: Any) -> Tensor:
        return out_in(layer, stack, stored.rows()).unsqueeze(0)  # a transposition, if any, so it is its own inverse

    return Update(f"{layer.experts}.{stack}", expert, False, (stored,), rows, stored.torch_dtype)


def _of_bank(trained: Mapping[str, Trained], layer: MoeLayer, bank: ExpertBank) -> Iterator[Update]:
    """Yield the updates of the experts of a layer, one for each matrix or bias that trains or has LoRA."""
    for expert in bank.plan.trained:
        for stack in stacks(layer):
            yield _of_trained(layer, stack, expert, trained[trained_name(layer, expert, stack)])
    if (lora := bank.lora) is None:
        return
    for expert in lora.slots:
        for stack in stacks(layer):
            if not (matrix := matrix_of(stack)).endswith("_bias"):
                names = (lora.stored_name(f"{matrix}_{factor}", expert) for factor in "AB")
                A, B = (trained[f"{layer.experts}.lora.{name}"] for name in names)
                yield of_expert(layer, stack, expert, A, B, lora.rows_of_parts[matrix], lora.scale)


def of_expert(
    layer: MoeLayer, stack: str, expert: int, A: Trained, B: Trained, parts: tuple[slice, ...], scale: float
) -> Update:
    """Return the update W + scale · B · A of a matrix of an expert.

    Args:
        stack: transformers' name of the parameter that stacks the experts of the layer, such as `down_proj`.
        A, B: factors [P, r, in] and [P, out / P, r] of the P parts of the matrix.
        parts: the output rows of each part: those of gate and of up if they have separate factors, else all rows.
    """

    def rows(old: Tensor | None, start: int, stop: int) -> Tensor:
        assert old is not None
        weight = out_in(layer, stack, old[0])
        for part, a, b in zip(parts, A.rows().float(), B.rows().float(), strict=True):
            weight[part].addmm_(b, a, alpha=scale)
        return old

    return Update(f"{layer.experts}.{stack}", expert, True, (A, B), rows)


def placed(
    model: ResolvedModel, chosen: Iterable[Update], base: Mapping[str, Stored]
) -> list[tuple[Update, KeyMapping]]:
    """Pair each update in `chosen` with the mapping of the base checkpoint's tensors that store its parameter.

    `base` are the tensors of the base checkpoint by name; the mapping of an expert's row covers this expert alone. A
    tied parameter gives one pair for each of its names in the checkpoint. Raises `UserError` for a parameter that the
    checkpoint does not store.
    """
    mappings, pairs = key_mappings(model.plain, base), []
    for update in chosen:
        tied = (name for name, first in model.structure.tied.items() if first == update.parameter)
        matches = [mappings[name] for name in (update.parameter, *tied) if name in mappings]
        if not matches:
            raise UserError(f"the base checkpoint has no tensors for {update.parameter}")
        pairs += [(update, match if update.expert is None else match.of_expert(update.expert)) for match in matches]
    return pairs


def new_rows(
    update: Update, mapping: KeyMapping, base: Mapping[str, Stored], *, into: Mapping[str, Stored] | None = None
) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (name of a tensor in the checkpoint, index of its first new row, new rows) for an update.

    Rows are computed one expert at a time, or in blocks of about 4 million weights; a parameter that transformers
    converts on loading is computed whole.

    Args:
        mapping: the checkpoint's tensors that store the parameter, from `placed`.
        base: the tensors of the base checkpoint by name.
        into: the tensors of a new checkpoint that may be quantized. Rows with LoRA then stay in float32, where some
            are otherwise rounded to the base's dtype, and a quantized matrix comes whole: its scales are for many rows.

    Raises:
        UserError: the parameter has another shape in the base than in the model.
    """
    if mapping.conversion is None and update.expert is None:
        (key,) = mapping.every_key()
        target = None if into is None else into[key]
        is_whole = isinstance(target, Quantized) and not target.STACKS
        for start, stop in [(0, base[key].num_rows)] if is_whole else base[key].blocks():
            old = base[key].rows(start, stop).float() if update.is_added else None
            yield key, start, update.rows(old, start, stop)
        return
    first, last, old = 0, None, None
    shape = tuple(mapping.model.get_parameter(update.parameter).shape)
    if update.expert is not None:
        shape = 1, *shape[1:]
        if not mapping.has_experts_apart:
            first, last = update.expert, update.expert + 1
    if update.is_added:
        old = mapping.to_model(lambda key: base[key].rows(first, last)).float()
        if tuple(old.shape) != shape:
            raise UserError(f"{update.parameter} is {[*old.shape]} in the base checkpoint, not {[*shape]}")
    new = update.rows(old, 0, shape[0])
    if update.is_added:
        del old
        if into is None:  # cast first: the conversion copies the tensor
            new = new.to(base[mapping.every_key()[0]].torch_dtype)
    for key, rows in mapping.to_checkpoint(new, base).items():
        yield key, first, rows


def write_updates(
    targets: Iterable[tuple[Update, KeyMapping]], base: Mapping[str, Stored], output: Mapping[str, Stored]
) -> set[str]:
    """Write the rows of updates, paired by `placed`, over those of a copy of the base, whose tensors are `output`.

    Returns the names of the tensors that changed; a warning is printed if rounding to their dtype left none. Raises
    `UserError` for values beyond those of float16, if the base has it.
    """
    changed = set()
    for update, mapping in targets:
        for key, start, rows in new_rows(update, mapping, base):
            stored = output[key]
            if stored.dtype == "F16" and not rows.half().isfinite().all():
                raise UserError(
                    f"{key} would hold values that float16, the type of the base, does not: was it trained so?"
                )
            if key not in changed and not _holds(stored, rows, start):
                changed.add(key)
            stored.write(rows, start)
            del rows  # before the next update's are computed
    if not changed:
        note("warning: the base's weights stay as they are: what was trained is too small for their dtype")
    return changed


def _holds(stored: Stored, rows: Tensor, start: int) -> bool:
    _, step = next(stored.blocks())
    return all(
        torch.equal(stored.as_written(part), stored.rows(at, at + len(part)))
        for at, part in zip(range(start, start + len(rows), step), rows.split(step), strict=True)
    )
