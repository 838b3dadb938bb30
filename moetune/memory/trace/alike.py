"""Choice of the decoder layers that a trace runs in place of many identical ones.

Identical layers allocate the same memory in the same order if their neighbours have equal sides: what of a layer goes
beyond it, such as its experts, which are copied one layer ahead, or where its input is kept. So a stack of decoder
layers is shortened like a walk that visits places again: if two layers have equal sides, and so have the layers before
them, the stretch from one to the other is left out, unless only there a kind of layer has such neighbours. Of many
identical layers the first, the second and the last are run; of layers that alternate, such as attention with a window
and without, one of each kind besides. Each layer that is left out has the place of one that is run, which stands for
it: repeat.py writes out its part of the log.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache

from moetune.parallel.ranks import Ranks
from moetune.run.kinds import kinds_of
from moetune.run.resolve import ResolvedRun


@dataclass(frozen=True)
class Stack:
    """A stack of decoder layers of which some are run.

    Attributes:
        kept: numbers of the layers that are run, ascending.
        like: for each layer of the whole stack, the index in `kept` of the layer that stands for it: the same kind of
            layer, between the same kinds of layers. A layer that is run stands for itself.
    """

    kept: tuple[int, ...]
    like: tuple[int, ...]

    @classmethod
    def of(cls, kinds: Sequence[Hashable], sides: Sequence[Hashable] | None = None) -> "Stack":
        """Choose the layers to run.

        Args:
            kinds: for each decoder layer, a value that is equal for identical ones (`kinds_of`).
            sides: for each, a value that is equal for those that are identical for their neighbours; None: `kinds`.
        """
        numbers: dict[Hashable, int] = {}
        return _shortened(
            *(tuple(numbers.setdefault(kind, len(numbers)) for kind in values) for values in (kinds, sides or kinds))
        )

    @classmethod
    def whole(cls, layers: int) -> "Stack":
        """Return a stack of this many layers that are all run."""
        return cls(tuple(range(layers)), tuple(range(layers)))


@dataclass(frozen=True)
class Shortened:
    """A run reduced to some of its decoder layers, which stand for identical ones that are left out.

    Attributes:
        run: the run without the layers that are left out.
        stack: the layers of the whole model, and which of them are run.
    """

    run: ResolvedRun
    stack: Stack


def shorten(run: ResolvedRun, ranks: Ranks, *, whole: bool = False) -> Shortened:
    """Return a run without the decoder layers for which identical layers can stand.

    Of `ranks` only the traced rank's positions on the axes `ep` and `pp` matter, which decide the experts and layers
    that it holds: the stack is that of its own layers, numbered from 0. Layers of different stages of a pipeline never
    stand for each other. Layers on other ranks are not left out yet, because what trains in them matters. With
    `whole` every layer runs.
    """
    mine = run.held_layers(ranks.coordinates.pp)
    of_stages = (
        [(stage, values[layer]) for layer, stage in mine.items()] for values in kinds_of(run, ranks.coordinates.ep)
    )
    stack = Stack.whole(len(mine)) if whole else Stack.of(*of_stages)
    layers = [*mine]
    return Shortened(run.without_layers(set(layers) - {layers[number] for number in stack.kept}), stack)


@cache
def _shortened(kinds: tuple[int, ...], sides: tuple[int, ...]) -> Stack:
    """Return `Stack.of` of layers whose kinds are given as numbers."""
    before, after = (-1, *sides[:-1]), (*sides[1:], -1)
    contexts = tuple(zip(before, sides, after, kinds, strict=True))
    kept = list(range(len(kinds)))
    while stretch := _needless(kept, contexts):
        del kept[stretch]
    place: dict[Hashable, int] = {}
    for number, layer in enumerate(kept):
        place.setdefault(contexts[layer], number)
    own = {layer: number for number, layer in enumerate(kept)}
    return Stack(tuple(kept), tuple(own.get(layer, place[context]) for layer, context in enumerate(contexts)))


def _needless(kept: Sequence[int], contexts: Sequence[tuple[int, int, int, int]]) -> slice | None:
    """Return the longest stretch of `kept` that can be left out; None if there is none.

    `contexts` are, for each layer, the sides of the layer before it, of itself and of the layer after it, and its kind.
    The layers at both ends of a stretch must continue as before: the first layer of the stretch and the layer after it
    have equal sides, and so have the layers before these two. And of each context a layer must remain elsewhere.
    """
    left = Counter(contexts[layer] for layer in kept)
    for size in range(len(kept) - 2, 0, -1):
        for start in range(len(kept) - 1 - size, 0, -1):
            if contexts[kept[start]][:2] == contexts[kept[start + size]][:2]:
                inside = Counter(contexts[layer] for layer in kept[start : start + size])
                if all(left[context] > count for context, count in inside.items()):
                    return slice(start, start + size)
    return None
