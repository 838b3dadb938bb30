"""Layers that are alike take the same memory in the same order: a few of them stand for all.

A stack of decoder layers is groups that repeat: one layer, or a few that take turns (attention with a window and
without). Of a group that repeats often the first, the second and the last are run; the second, which has neighbours of
its own kind on both sides, stands for all that are left out (repeat.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from moetune.models.stack import decoder_layers
from moetune.parallel.ranks import Ranks
from moetune.run.resolve import ResolvedRun

_LONGEST = 8
"""Layers of a group: the longest turn that a known architecture takes."""


@dataclass(frozen=True)
class Unit:
    """A group of layers that is run, and the groups that it stands for, itself the first of them.

    Attributes:
        copies: the layer numbers of each group, in order.
    """

    copies: tuple[tuple[int, ...], ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return self.copies[0]


@dataclass(frozen=True)
class Shortened:
    """A run with fewer decoder layers.

    Attributes:
        run: the same but for the layers that are left out.
        kept: the numbers of those that are run, in order.
        units: what some of them stand for.
    """

    run: ResolvedRun
    kept: tuple[int, ...]
    units: tuple[Unit, ...]


def shorten(run: ResolvedRun, ranks: Ranks) -> Shortened:
    """Leave out layers that others can stand for."""
    kinds = kinds_of(run, ranks.coordinates.ep)
    kept, units = groups(kinds)
    return Shortened(run.without_layers(set(range(len(kinds))) - set(kept)), tuple(kept), tuple(units))


def groups(kinds: Sequence[Hashable]) -> tuple[list[int], list[Unit]]:
    """Choose the layers to run, by the kind of each, and what they stand for."""
    kept: list[int] = []
    units: list[Unit] = []
    at = 0
    while at < len(kinds):
        size, times = max(
            ((size, _times(kinds, at, size)) for size in range(1, _LONGEST + 1)),
            key=lambda found: (found[0] * (found[1] - 3), -found[0]),
        )
        if times < 4:
            kept.append(at)
            at += 1
            continue
        found = [tuple(range(start, start + size)) for start in range(at, at + size * times, size)]
        kept += [*found[0], *found[1], *found[-1]]
        units.append(Unit(tuple(found[1:-1])))
        at += size * times
    return kept, units


def _times(kinds: Sequence[Hashable], at: int, size: int) -> int:
    """Number of consecutive repetitions of the group of `size` kinds at this place."""
    times, group = 1, kinds[at : at + size]
    while kinds[at + times * size : at + (times + 1) * size] == group:
        times += 1
    return times if len(group) == size else 0


def kinds_of(run: ResolvedRun, ep: int) -> list[Hashable]:
    """Properties that a decoder layer's memory depends on, by layer, on one of the `ep` ranks."""
    selection, held = run.selection, {layer: of_ranks[ep] for layer, of_ranks in run.placement.items()}
    outside = {part.name for part in run.structure.parameters if part.layer is None}
    checkpointing = run.config.train.checkpointing
    # Whether gradients have to go through the layer, whatever trains in it; under checkpointing they always do.
    arrive = checkpointing in ("full", "offload") or bool(selection.full & outside)
    kinds: list[Hashable] = []
    for number, (path, layer) in enumerate(decoder_layers(run.model.plain).items()):
        trains = (
            frozenset(name.removeprefix(path) for name in selection.full if name.startswith(f"{path}.")),
            frozenset(name.removeprefix(path) for name in selection.lora_linears if name.startswith(f"{path}.")),
            selection.experts.get(number, ()),
            selection.lora_experts.get(number, ()),
        )
        stays = checkpointing == "offload" and number == 0  # its input, if it is that of a frozen embedding
        kinds.append((arrive, stays, trains, held.get(number, ()), *_make(layer)))
        arrive = arrive or any(trains)
    return kinds


_NUMBERS = ("layer_idx", "layer_index", "layer_id", "block_idx", "layer_number", "depth")


def _make(layer: nn.Module) -> Iterator[Hashable]:
    """Classes, tensors and plain settings of a layer and everything in it, its number left out."""
    for path, module in layer.named_modules():
        settings = tuple(
            (name, value)
            for name, value in sorted(vars(module).items())
            if isinstance(value, (bool, int, float, str, type(None))) and name not in _NUMBERS
        )
        tensors = tuple(
            (name, tuple(tensor.shape), tensor.dtype)
            for own in (module._parameters, module._buffers)
            for name, tensor in own.items()
            if tensor is not None
        )
        yield path, type(module), settings, tensors
