"""`Costs`: what each layer of a run may keep for backward, the bytes that it takes and the time that it saves.

A *thing* is a `Kept` (run/keeps.py): the set of what a layer keeps beside its input, such as attention's output.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from moetune.memory.assumed_routing import AssumedRouting
from moetune.memory.keep.knapsack import Option, best, fits
from moetune.memory.time.roofline import duration
from moetune.memory.time.work import sums
from moetune.memory.trace import Trace, trace
from moetune.memory.trace.alike import kinds_of
from moetune.memory.trace.repeat import Stretch, stretches
from moetune.models.catalog.gpus import Gpu, find_gpu
from moetune.models.stack import decoder_layers
from moetune.parallel.coordinates import Coordinates
from moetune.run.keeps import NOTHING, Kept
from moetune.run.resolve import ResolvedRun


@dataclass(frozen=True)
class _Cost:
    """What a layer costs if it keeps a thing.

    Attributes:
        kept: bytes alive between its forward and its backward pass.
        forward, backward: most bytes of that pass, beside what is alive when the pass begins.
        time: nanoseconds of both passes.
    """

    kept: int
    forward: int
    backward: int
    time: int


@dataclass(frozen=True)
class Costs:
    """What each layer of a run may keep, and what that takes and saves.

    Attributes:
        things: [layers] the things that the layer may keep.
        options: [layers][things] bytes and time of keeping the thing, as an option for `best`.
        alike: [layers] a key that is equal for identical layers. The last MoE layer has its own if the loss would have
            smaller chunks when that layer keeps `rest`, which then counts as saving no time.
        peak: most bytes of live tensors in a step in which layers keep as little as they may.
        end: most bytes alive between the forward pass of the last layer and its backward pass, in that step.
    """

    things: list[list[Kept]]
    options: list[list[Option]]
    alike: list[Hashable]
    peak: int
    end: int

    @classmethod
    def of(cls, base: ResolvedRun, asked: ResolvedRun, card: Gpu, routing: AssumedRouting) -> "Costs":
        """Trace steps of a few layers of each kind, and the step of `base`, and derive the costs from them.

        Args:
            base: the run with layers that keep as little as they may.
            asked: the run as the user wrote it, whose `auto` says what is left open.
            card: the GPU; one of unknown speed is taken to have the ratios of an L40S.
            routing: assumed number of tokens that each expert receives.
        """
        alike = kinds_of(base, Coordinates.of(base.config.parallel, 0).ep)
        things = [_things(asked, base, layer) for layer in range(len(alike))]
        costs = _measured(base, card, routing, alike, things)
        traced = trace(base, routing, gpu=card)
        forward, backward, end = _peaks(traced, list(decoder_layers(base.model.plain)))
        options: list[list[Option]] = []
        last = base.structure.moe_layers[-1].index if base.structure.moe_layers else None
        for layer, kind in enumerate(alike):
            full = costs[kind, things[layer][0]]
            options.append([])
            for kept in things[layer]:
                cost = costs[kind, kept]
                saves = max(0, full.time - cost.time)
                if layer == last and _loss_bytes(base, layer, kept) < _loss_bytes(base, layer, kept - {"rest"}):
                    # its recomputation takes less time than the smaller chunks of logits that it would lead to
                    alike[layer], saves = "bounds the loss", 0
                more = max(0, cost.kept - full.kept)
                peak = max(
                    forward[layer] + cost.forward - full.forward - more, backward[layer] + cost.backward - full.backward
                )
                options[-1].append(Option(more, peak, saves))
        return cls(things, options, alike, int(traced.device[traced.begin :].max()), end)

    def keeps(self, budget: int) -> dict[int, Kept]:
        """Return layer -> the thing to keep, for most time saved while the peak rises by at most `budget` bytes.

        Layers that keep nothing are left out. Of identical layers, the last ones keep most: their bytes are freed first
        in backward.
        """
        limit = self.peak + budget
        chosen = best(self.options, limit, self.end) or [0] * len(self.things)
        ordered = list(chosen)
        for kind in dict.fromkeys(self.alike):
            layers = [layer for layer, its in enumerate(self.alike) if its == kind]
            by_need = sorted((chosen[layer] for layer in layers), key=lambda one: self.options[layers[-1]][one].bytes)
            for layer, index in zip(layers, by_need, strict=True):
                ordered[layer] = index
        if fits(self.options, ordered, limit, self.end):
            chosen = ordered
        return {layer: self.things[layer][index] for layer, index in enumerate(chosen) if self.things[layer][index]}


def _things(asked: ResolvedRun, base: ResolvedRun, layer: int) -> list[Kept]:
    """Return the things that a layer may keep: first what it keeps in `base`, then each that `auto` leaves open."""
    own = base.keeps.get(layer, NOTHING)
    levels: list[Kept] = [NOTHING]
    if asked.config.train.checkpointing == "auto":
        levels += [frozenset(("attention",)), frozenset(("rest",))]
    has_rows = any(one.index == layer for one in base.structure.moe_layers)
    rows: list[Kept] = [NOTHING, frozenset(("rows",))] if has_rows else [NOTHING]
    return [own | level | row for level in levels for row in rows]


def _loss_bytes(base: ResolvedRun, layer: int, kept: Kept) -> int:
    """Return the bytes of logits that the loss may hold at once if `layer` keeps `kept`; 0 for no limit."""
    return base.keeping({**base.keeps, layer: kept}).loss_bytes() or 0


def _measured(
    base: ResolvedRun, card: Gpu, routing: AssumedRouting, alike: list[Hashable], things: list[list[Kept]]
) -> dict[tuple[Hashable, Kept], _Cost]:
    """Return (kind, thing) -> the cost of a layer of that kind (`alike`) that keeps the thing.

    A few layers of each kind are traced, each of which keeps another thing, in several steps if there are fewer layers
    than things.
    """
    found: dict[tuple[Hashable, Kept], _Cost] = {}
    members = {kind: [layer for layer, its in enumerate(alike) if its == kind] for kind in alike}
    chosen = {}
    for kind, layers in members.items():
        most = len(things[layers[0]])
        chosen[kind] = layers[1 : most + 1] if len(layers) > most else layers  # the first layer has no layer below it
    rounds = max(ceil(len(things[layers[0]]) / len(layers)) for layers in chosen.values())
    ends = {0, len(alike) - 1}  # run too, so that layers in between have neighbours
    for number in range(rounds):
        keeps = {
            layer: things[layer][(number * len(layers) + place) % len(things[layer])]
            for layers in chosen.values()
            for place, layer in enumerate(layers)
        }
        layers = sorted(ends | keeps.keys())
        train = {"accumulate": 1, "eval_micro_batch": None}
        probe = replace(base, config=base.config.but(train=train), keeps={**base.keeps, **keeps})
        probe = probe.without_layers(set(range(len(alike))) - set(layers))
        traced = trace(probe, routing, gpu=card, shortened=False)
        for layer, cost in zip(layers, _costs(traced, card), strict=True):
            if layer in keeps:
                found.setdefault((alike[layer], keeps[layer]), cost)
    return found


def _costs(traced: Trace, card: Gpu) -> Iterator[_Cost]:
    """Yield the cost of each layer of a traced step in which all layers ran, from its last passes."""
    log, alive = traced.log, np.concatenate([[0], traced.device])
    numbers = sorted({cut.layer for cut in log.cuts if cut.layer >= 0})
    passes: dict[tuple[int, bool], Stretch] = {
        (one.layer, one.backward): one for one in stretches(log, numbers) if one.layer >= 0
    }
    fast = card if card.bandwidth is not None else find_gpu("l40s")
    for layer in numbers:
        forward, backward = passes[layer, False], passes[layer, True]
        work = sums(one for one in log.done for its in (forward, backward) if its.start <= one.at < its.stop)
        estimate = duration(work, 1, fast)
        seconds = 0.0 if estimate is None else (estimate.seconds.fast * estimate.seconds.slow) ** 0.5
        up, down = (int(alive[its.start : its.stop + 1].max() - alive[its.start]) for its in (forward, backward))
        yield _Cost(int(alive[forward.stop] - alive[forward.start]), up, down, round(seconds * 1e9))


def _peaks(traced: Trace, paths: list[str]) -> tuple[list[int], list[int], int]:
    """Return the most bytes alive in the last micro-step: [layers] in the forward pass and [layers] in the backward
    pass of each layer, whose `paths` are given; and between the two passes of the last layer."""
    layers = {path: number for number, path in enumerate(paths)}
    passes = {"forward": [0] * len(paths), "backward": [0] * len(paths)}
    marks = traced.marks
    stops = [*(mark.at for mark in marks[1:]), traced.end + 1]
    within = [
        (mark, stop)
        for mark, stop in zip(marks, stops, strict=True)
        if mark.phase in ("forward", "backward", "recompute")
    ]
    last = max((mark.step, mark.micro_step) for mark, _ in within)
    end, now = 0, None
    for mark, stop in within:
        if (mark.step, mark.micro_step) != last:
            continue
        inside = next((n for path, n in layers.items() if f"{mark.module}.".startswith(f"{path}.")), None)
        is_around = not mark.module or any(path.startswith(f"{mark.module}.") for path in paths)
        now = inside if inside is not None or not is_around else now
        most = int(traced.device[mark.at : stop].max(initial=0))
        if now is not None:
            of = passes["forward" if mark.phase == "forward" else "backward"]
            of[now] = max(of[now], most)
        elif any(passes["forward"]) and not any(passes["backward"]):
            end = max(end, most)
    return passes["forward"], passes["backward"], end
