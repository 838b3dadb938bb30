"""What training did, said in the names and the layout of the plain model, and where that is in a checkpoint.

A `Change` is what became of one parameter, or of one expert's share of a stack; a `Piece` is some rows of one tensor
of a checkpoint with their new values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moetune.adapt.weights.target import out_in
from moetune.errors import UserError
from moetune.experts.bank import ExpertBank
from moetune.exporting.finished_run import FinishedRun
from moetune.models.hub.names import KeyMapping
from moetune.models.hub.tensor_files import Held, Stored
from moetune.models.structure import MoeLayer
from moetune.run.names import linear_factors, matrix_of, stacks, trained_name, whole_name


@dataclass(frozen=True)
class Change:
    """One parameter of the plain model, or one expert's share of it.

    Attributes:
        parameter: its name in the plain model.
        expert: whose share; None for all of a parameter.
        base_matters: whether the new value is the old one plus something, as with LoRA.
        new: (old rows in float32 or None, first row, row after the last) -> new rows, in the layout of the plain
            model. An expert's share has the one row [1, ...]. It may write into the old rows.
    """

    parameter: str
    expert: int | None
    base_matters: bool
    new: Callable[[Tensor | None, int, int], Tensor]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Piece:
    """New rows of the checkpoint's tensor `key`, from row `start` on."""

    key: str
    start: int
    rows: Tensor


def changes(run: FinishedRun) -> list[Change]:
    """Every change of a run, read from its checkpoint when asked for."""
    found: list[Change] = []
    for layer in run.adapted.structure.moe_layers:
        bank = run.adapted.model.get_submodule(layer.experts)
        assert isinstance(bank, ExpertBank)
        found += _of_trained_experts(run, layer, bank)
        found += _of_expert_lora(run, layer, bank)
    selection = run.adapted.selection
    found += [_of_linear_lora(run, path) for path in selection.lora_linears]
    found += [_whole(name, run.trained[whole_name(name, selection)]) for name in sorted(selection.full)]
    found += [_whole(name, run.trained[name]) for name in run.adapted.run.router_biases.values()]
    return found


def _whole(parameter: str, stored: Stored | Held) -> Change:
    return Change(parameter, None, False, lambda _, start, stop: stored.rows(start, stop), stored.torch_dtype)


def _of_linear_lora(run: FinishedRun, path: str) -> Change:
    """W + scale·B·A of a linear layer, some output rows at a time."""
    A, B = (run.trained[name] for name in linear_factors(path).values())
    assert run.adapted.selection.lora is not None
    scale = run.adapted.selection.lora.scale

    def new(base: Tensor | None, start: int, stop: int) -> Tensor:
        assert base is not None
        return base + scale * B.rows(start, stop).float() @ A.rows().float()

    return Change(f"{path}.weight", None, True, new)


def _of_trained_experts(run: FinishedRun, layer: MoeLayer, bank: ExpertBank) -> Iterator[Change]:
    for expert in bank.plan.trained:
        for stack in stacks(layer):
            stored = run.trained[trained_name(layer, expert, stack)]

            def new(
                _: Tensor | None, start: int, stop: int, stored: Stored | Held = stored, stack: str = stack
            ) -> Tensor:
                return out_in(layer, stack, stored.rows()).unsqueeze(0)  # [in, out] to [out, in] is its own inverse

            yield Change(f"{layer.experts}.{stack}", expert, False, new, stored.torch_dtype)


def _of_expert_lora(run: FinishedRun, layer: MoeLayer, bank: ExpertBank) -> Iterator[Change]:
    if bank.lora is None:
        return
    scale = bank.lora.scale
    for expert in bank.lora.slots:
        for stack in stacks(layer):
            part = matrix_of(stack)
            if part.endswith("_bias"):
                continue
            A, B = (run.trained[f"{layer.experts}.lora.{part}_{factor}.{expert}"] for factor in "AB")
            rows = bank.lora.gate_up_rows if part == "gate_up" else (slice(None),)

            def new(
                base: Tensor | None,
                start: int,
                stop: int,
                A: Stored | Held = A,
                B: Stored | Held = B,
                rows: tuple[slice, ...] = rows,
                stack: str = stack,
            ) -> Tensor:
                assert base is not None
                weight = out_in(layer, stack, base[0])
                for where, a, b in zip(rows, A.rows().float(), B.rows().float(), strict=True):
                    weight[where].addmm_(b, a, alpha=scale)
                return base

            yield Change(f"{layer.experts}.{stack}", expert, True, new)


def homes_of(change: Change, homes: Mapping[str, KeyMapping], tied: Mapping[str, str]) -> list[KeyMapping]:
    """Where a change goes: to its parameter's home, and to those that the checkpoint has for names tied to it.

    Raises:
        UserError: the checkpoint has none, or one that cannot be written back.
    """
    names = [change.parameter, *(name for name, first in tied.items() if first == change.parameter)]
    found = [homes[name] for name in names if name in homes]
    if not found:
        raise UserError(f"the base checkpoint has no tensors that {change.parameter} could go back to")
    return found if change.expert is None else [home.of_expert(change.expert) for home in found]


def pieces(change: Change, home: KeyMapping, base: Mapping[str, Stored]) -> Iterator[Piece]:
    """The rows of the checkpoint that a change makes new, an expert or some 4 million weights at a time."""
    if home.conversion is None and change.expert is None:
        (key,) = home.every_key()
        for start, stop in base[key].blocks():
            old = base[key].rows(start, stop).float() if change.base_matters else None
            yield Piece(key, start, change.new(old, start, stop))
        return
    first, last = (0, None) if change.expert is None or home.has_experts_apart else (change.expert, change.expert + 1)
    whole = tuple(home.model.get_parameter(change.parameter).shape)
    old = None
    if change.base_matters:
        old = home.to_model(lambda key: base[key].rows(first, last)).float()
        expected = whole if change.expert is None else (1, *whole[1:])
        if tuple(old.shape) != expected:
            raise UserError(f"{change.parameter} is {[*old.shape]} in the base checkpoint, not {[*expected]}")
    new = change.new(old, 0, 1 if change.expert is not None else whole[0])
    if change.base_matters:
        del old
        new = new.to(base[home.every_key()[0]].torch_dtype)  # before it is taken apart, which copies it
    for key, rows in home.to_checkpoint(new).items():
        yield Piece(key, first, rows)
