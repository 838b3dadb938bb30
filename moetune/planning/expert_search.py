"""`ExpertSearch`: find how many layers, and how many experts in each, train most experts of those that fit a GPU.

One record covers every number of layers and most numbers of experts in each (memory/closed_form/), but evaluating all
of them would take a minute, so few are. Where layers of several kinds alternate, most numbers of layers need a record
of their own: then the experts of all layers train, or of one of few numbers of layers.
With a fixed number of trained experts in each layer, memory is linear in the number of layers. With more experts in
each layer this line lies higher, because the gradients of a layer's experts are alive together. So the total that fits
with a number of experts in each layer bounds the total for every larger number.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from moetune.memory.report import MemoryReport
from moetune.planning.candidate import worth
from moetune.planning.solve import last_that_fits

_TOLERANCE = 0.005
"""Share by which a number of experts that a straight line estimates may be too low."""
_NEAR = 8
"""If the first search has more than twice as many experts in each layer, half as many are searched next, so that the
line of `_room` through both bounds all other numbers."""
_FEW = 2
"""If that many experts of each layer fit, fewer layers are not tried where few numbers of layers share records: at
most half again as many experts would train, and none of the other layers."""


@dataclass(frozen=True)
class ExpertSearch:
    """A search for the run with most trained experts that fits, of one strategy of a plan.

    Attributes:
        layers: number of layers with experts.
        experts: number of experts of each.
        depths: numbers of layers whose experts may train, ascending: 1, which is tried only if nothing else fits; then
            all numbers from another one to `layers`, or few of them and `layers`.
        step: step between numbers of trained experts in each layer.
        limit: upper bound of the number of experts, in all layers together, that fit.
        bound: returns a lower bound of the bytes that a number of trained experts, in all layers together, needs.
        report: (layers, experts in each) -> predicted memory of the run that trains them.
        left: returns the bytes that a run leaves free, negative if it does not fit.
        margin: bytes that must be left free.
    """

    layers: int
    experts: int
    depths: Sequence[int]
    step: int
    limit: int
    bound: Callable[[int], int]
    report: Callable[[int, int], MemoryReport]
    left: Callable[[MemoryReport], int]
    margin: int = 0

    def most(self, more_than: int) -> tuple[int, int]:
        """Return (layers, experts in each) of the run with most experts, layers × experts in each, that fits; of equal
        ones, with fewest in each. No more than `worth(more_than)` if there is none that trains more."""
        rest = self.depths[1:] or self.depths
        best = (self._of_any_depth if len(rest) == self.layers - rest[0] + 1 else self._of_few_depths)(rest, more_than)
        if best[0] or more_than or rest == self.depths:
            return best
        each, _ = self._each_of(1, worth(more_than), self.limit)
        return (1, each) if each else (0, 0)

    def _of_few_depths(self, depths: Sequence[int], more_than: int) -> tuple[int, int]:
        """Return what `most` describes, where only `depths` are numbers of layers; (0, 0) if there is none.

        Most layers come first. Fewer are tried only while less than `_FEW` experts of each layer are known to fit, in
        order of the most experts that can fit there: no more, in all layers together, than with most layers.
        """
        of_all = depths[-1]
        each, room = self._each_of(of_all, worth(more_than), self.limit)
        best = (of_all, each) if each else (0, 0)

        def promised(layers: int) -> tuple[int, int]:
            return layers * min(self.experts, room // (layers * self.step) * self.step), layers

        for layers in sorted(depths[:-1], key=promised, reverse=True):
            enough = max(worth(more_than), worth(best[0] * best[1]))
            if enough >= self.layers * _FEW * self.step:
                break
            if promised(layers)[0] > enough and (each := self._each_of(layers, enough, room)[0]):
                best = max(best, (layers, each), key=lambda one: _rank(*one))
        return best

    def _each_of(self, layers: int, enough: int, most: int) -> tuple[int, int]:
        """Return how many experts of each of the first `layers` layers fit, 0 if all together they are not more than
        `enough`; and how many fit in all layers together, by a straight line through what was predicted.

        At most `most` fit in all layers together.
        """
        step = self.step
        sizes = range(step, min(self.experts, most // layers) + 1, step)
        first, line = bisect_right(sizes, enough // layers), dict[int, MemoryReport]()

        def last_of(count: int, least: int) -> int:
            last, found = last_that_fits(
                count,
                lambda index: self.report(layers, sizes[index]),
                count - 1,
                least,
                margin=self.margin,
                left=self.left,
                sizes=sizes,
                slope=layers * (self.bound(1) - self.bound(0)),
            )
            line.update((layers * sizes[index], report) for index, report in found.items())
            return last

        # all experts of a layer, or all but one, need records of their own: they are tried if all other numbers fit
        shared = bisect_left(sizes, self.experts - step)
        last = last_of(shared, first) if first < shared else first - 1
        if shared - 1 <= last < len(sizes) - 1 and layers * sizes[-1] > worth(layers * sizes[last]):
            last = last_of(len(sizes), last + 1)
        return (sizes[last] if last >= first else 0), self._end_of_line(line, most, self.bound(1) - self.bound(0))

    def _of_any_depth(self, depths: Sequence[int], more_than: int) -> tuple[int, int]:
        """Return what `most` describes, where any number of layers in the range `depths` may train; (0, 0) layers and
        experts if nothing fits that trains more than `more_than`.

        Numbers of experts in each layer are tried in order of the total that `_room` expects of them, until no other
        one can exceed the largest total found, or `more_than`, by enough to be `worth` a search; for each, only depths
        that would exceed it are predicted. On several ranks, all train equally many experts (`step`).
        """
        shallow, depth, step = depths[0], self.layers, self.step
        best, of_layer = (0, step), range(step, self.experts + 1, step)
        room: dict[int, int] = {}  # experts in each layer -> experts in all layers that fit by its line

        def expected(each: int) -> tuple[int, int]:
            return _rank(min(depth, _room(room, each, most) // each), each)

        def promised(each: int) -> tuple[int, int]:
            return _rank(min(depth, min(int(_room(room, each, most) * (1 + _TOLERANCE)), most) // each), each)

        most = self.limit
        slope: float = self.bound(1) - self.bound(0)  # bytes of another expert
        while True:
            enough = max((worth(best[0] * best[1]), -best[1]), (worth(more_than), 0))
            left = [
                each
                for each in of_layer
                if each not in room and promised(each) > enough and promised(each)[0] >= shallow * each
            ]
            if not left:
                break
            # all experts of a layer, or all but one, need records of their own: they come last
            is_all = most == depth * self.experts
            each = max(left, key=lambda each: (each < self.experts - step, expected(each)))
            start = depth if is_all else min(max(shallow, depth // 3), depth)
            half = each // (2 * step) * step
            if len(room) == 1 and each > 2 * _NEAR and half not in room:
                each = half  # a line through two numbers that are far apart bounds all others
                room[each] = self._end_of_line({start * each: self.report(start, each)}, most, slope)
                continue
            if len(room) > 1:
                start = min(max(_room(room, each, most) // each, shallow), depth)
            predicted = partial(lambda each, number: self.report(number + 1, each), each)
            least = max(next(number for number in range(depth) if _rank(number + 1, each) > enough), shallow - 1)
            last, found = last_that_fits(
                depth, predicted, start - 1, least, margin=self.margin, left=self.left, slope=slope * each
            )
            if last >= least:
                best = max(best, (last + 1, each), key=lambda one: _rank(*one))
            line = {(number + 1) * each: one for number, one in found.items()}
            room[each] = self._end_of_line(line, most, slope)
            slope = self._slope(line) or slope
            if not best[0] and not more_than and self.left(self.report(shallow, step)) < self.margin:
                break
        return best if best[0] else (0, 0)

    def _end_of_line(self, line: Mapping[int, MemoryReport], most: int, slope: float) -> int:
        """Return the number of experts, in all layers, at which memory reaches the GPU's size by linear extrapolation.

        Args:
            line: experts in all layers -> report of a run that trains them; with equally many layers in all runs, or
                equally many experts in each layer. Without runs the result is `most`.
            most: upper bound of the result.
            slope: bytes of another expert, used if `line` has a single run.
        """
        slope = self._slope(line) or slope
        if not line or slope <= 0:
            return most
        largest = max(line)
        return min(largest + int(self.left(line[largest]) / slope), most)

    def _slope(self, line: Mapping[int, MemoryReport]) -> float:
        """Return the bytes that another trained expert takes: the slope between the runs with fewest and with most
        experts in `line` (experts in all layers -> report); 0 for less than two runs."""
        if len(line) < 2:
            return 0
        one, other = min(line), max(line)
        return (self.left(line[one]) - self.left(line[other])) / (other - one)


def _room(room: Mapping[int, int], each: int, most: int) -> int:
    """Estimate how many trained experts fit in total, with `each` experts in each layer.

    The number falls nearly linearly with the experts in each layer. The estimate is a straight line through the two
    nearest known numbers, and at most the number at fewer experts in each layer.

    Args:
        room: experts in each layer -> total that fits, if known.
        each: experts in each layer, not in `room`.
        most: upper bound of the result.
    """
    found = min((room[fewer] for fewer in room if fewer < each), default=most)
    if len(room) > 1:
        one, other = sorted(room, key=lambda known: abs(known - each))[:2]
        found = min(found, int(room[one] + (room[other] - room[one]) * (each - one) / (other - one)))
    return min(found, most)


def _rank(layers: int, each: int) -> tuple[int, int]:
    """Return a sort key, greater for more experts in all layers together, then for fewer experts in each layer."""
    return layers * each, -each
