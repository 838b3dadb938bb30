"""Choice of the decoder layers that a trace runs, where a few of many identical layers stand for the others.

Identical layers allocate the same memory in the same order. A stack of decoder layers consists of groups that repeat: a
group is one layer, or a few layers that alternate, such as attention with a window and without. Of a group that repeats
at least three times only the first, the second and the last repetition are run: the shortened model. The second has
neighbours of its own kind on both sides and stands for all repetitions that are left out; repeat.py writes out their
part of the log.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from moetune.models.stack import decoder_layers
from moetune.parallel.ranks import Ranks
from moetune.run.keeps import recomputes_layers
from moetune.run.resolve import ResolvedRun

_LONGEST = 8
"""Most layers of a group: the longest pattern of alternating layers in a known architecture."""


@dataclass(frozen=True)
class Unit:
    """A group of consecutive decoder layers that is run, and the identical groups that it stands for. `copies` has the
    layer numbers of each group, in order of the model: `copies[0]` is run, the others are left out."""

    copies: tuple[tuple[int, ...], ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the layers that are run."""
        return self.copies[0]


@dataclass(frozen=True)
class Shortened:
    """A run reduced to some of its decoder layers, of which groups stand for identical layers that are left out.

    Attributes:
        run: the run without the layers that are left out.
        kept: numbers, in the whole model, of the layers that are run, ascending.
        units: groups of kept layers that stand for identical groups that are left out.
    """

    run: ResolvedRun
    kept: tuple[int, ...]
    units: tuple[Unit, ...]


def shorten(run: ResolvedRun, ranks: Ranks) -> Shortened:
    """Return a run without the decoder layers for which identical layers can stand. Of `ranks` only the traced rank's
    position on the `ep` axis matters, which decides the experts that it holds."""
    kinds = kinds_of(run, ranks.coordinates.ep)
    kept, units = groups(kinds)
    return Shortened(run.without_layers(set(range(len(kinds))) - set(kept)), tuple(kept), tuple(units))


def groups(kinds: Sequence[Hashable]) -> tuple[list[int], list[Unit]]:
    """Choose the decoder layers to run, given for each decoder layer a value that is equal for identical ones.

    Returns the numbers of the layers to run, ascending, and the groups among them that stand for identical groups. If
    no group repeats at least three times, all layers run and no group stands for others. With exactly three
    repetitions nothing is left out; the second is returned nevertheless, so that its record serves deeper models.
    """
    kept: list[int] = []
    units: list[Unit] = []
    at = 0
    while at < len(kinds):
        size, times = max(
            ((size, _times(kinds, at, size)) for size in range(1, _LONGEST + 1)),
            key=lambda found: (found[0] * (found[1] - 3), -found[0]),
        )
        if times < 3:
            kept.append(at)
            at += 1
            continue
        found = [tuple(range(start, start + size)) for start in range(at, at + size * times, size)]
        kept += [*found[0], *found[1], *found[-1]]
        units.append(Unit(tuple(found[1:-1])))
        at += size * times
    return kept, units


def _times(kinds: Sequence[Hashable], at: int, size: int) -> int:
    """Count how often the group of `size` kinds that starts at index `at` occurs in a row; 0 past the end."""
    times, group = 1, kinds[at : at + size]
    while kinds[at + times * size : at + (times + 1) * size] == group:
        times += 1
    return times if len(group) == size else 0


def kinds_of(run: ResolvedRun, ep: int) -> list[Hashable]:
    """Return, for each decoder layer, all properties that its memory depends on; equal for identical layers, and equal
    in every process. `ep` is the rank's position on the `ep` axis, which decides the experts that it holds."""
    selection, held = run.selection, {layer: of_ranks[ep] for layer, of_ranks in run.placement.items()}
    outside = {part.name for part in run.structure.parameters if part.layer is None}
    # Whether gradients pass through the layer even if nothing in it trains: always under checkpointing, else if an
    # earlier layer or a weight outside of the layers trains.
    arrive = recomputes_layers(run.config.train) or bool(selection.full & outside)
    kinds: list[Hashable] = []
    for number, (path, made) in enumerate(_layers(run.model.plain).items()):
        trains = (
            tuple(sorted(name.removeprefix(path) for name in selection.full if name.startswith(f"{path}."))),
            tuple(
                sorted(
                    (name.removeprefix(path), rank)
                    for name, rank in selection.ranks.items()
                    if name.startswith(f"{path}.")
                )
            ),
            selection.experts.get(number, ()),
            selection.lora_experts.get(number, ()),
        )
        quantized = tuple(sorted(one.removeprefix(path) for one in run.quantized_linears if one.startswith(f"{path}.")))
        on_host = run.config.train.checkpointing == "offload"
        stays = on_host and number == 0  # its input, a frozen embedding's output, stays on the GPU
        kept = tuple(sorted(run.keeps.get(number, ())))
        kinds.append((arrive, stays, kept, trains, quantized, held.get(number, ()), made))
        arrive = arrive or any(trains)
    return kinds


_KNOWN: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


def _layers(model: PreTrainedModel) -> dict[str, str]:
    """Return path -> digest of all that the memory of a decoder layer depends on (`_make`), for each layer."""
    if model not in _KNOWN:  # a plain model is never modified
        layers = decoder_layers(model).items()
        _KNOWN[model] = {path: sha256(repr([*_make(layer)]).encode()).hexdigest() for path, layer in layers}
    return _KNOWN[model]


_NUMBERS = ("layer_idx", "layer_index", "layer_id", "block_idx", "layer_number", "depth")
"""Attributes in which modules keep the number of their layer, which differs between identical layers."""


def _make(layer: nn.Module) -> Iterator[Hashable]:
    """Yield what a layer's memory depends on, for the layer and each module in it: path, class, plain attributes except
    the layer's number, and names, shapes and dtypes of tensors."""
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
