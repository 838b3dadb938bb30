"""ZeRO as its paper has it (arXiv 1910.02054), for `engine: deepspeed`: everything is divided evenly, byte by byte.

Beside the paper, DeepSpeed updates a float32 copy of float32 weights too, and gathers gradients in a bucket. Unlike
FSDP2 (sharded.py), weights under ZeRO 1 and 2 are held once, whole, and the updated ones are gathered after each step.
Formulas and assumptions: docs/concepts/parallelism.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from moetune.config import ParallelConfig
from moetune.memory.collectives import part, ring
from moetune.memory.quantities import Tensors, total
from moetune.memory.report import Collective
from moetune.parallel.deepspeed_json import reduce_bucket


@dataclass(frozen=True)
class Sharing:
    """The ranks that have the same parameters: `shards` of them share one copy, and `copies` such groups hold one."""

    axis: Literal["fsdp", "efsdp"]
    of: Literal["", " of experts"]
    shards: int
    index: int
    copies: int


Unit = tuple[tuple[Sharing, Tensors], ...]
"""Parameters that are gathered and reduced together: a layer, the embedding or the head."""


def kept(unit: Unit, parallel: ParallelConfig) -> tuple[list[Tensors], list[Tensors]]:
    """What a rank has of a unit on the device and on the host, by sharing."""
    shards = [_shard(tensors, sharing, parallel.zero) for sharing, tensors in unit]
    if parallel.offload == "none":
        return shards, []
    moved = [_offload(tensors, shard, s, parallel.zero) for (s, tensors), shard in zip(unit, shards, strict=True)]
    return [device for device, _ in moved], [host for _, host in moved]


def _cut(tensors: Tensors, ranks: int, index: int) -> Tensors:
    return Tensors(**{f.name: part(getattr(tensors, f.name), ranks, index) for f in fields(tensors)})


def _shard(tensors: Tensors, sharing: Sharing, zero: int) -> Tensors:
    """One rank's part under ZeRO 1 (optimizer), 2 (and gradients) or 3 (and weights); packed weights stay whole."""
    cut = _cut(replace(tensors, master=4 * tensors.numel), sharing.shards, sharing.index)
    cut = replace(cut, host=tensors.host)
    if zero < 3:
        plain = replace(cut, frozen=tensors.frozen, trainable=tensors.trainable, packed=tensors.packed)
        return plain if zero == 2 else replace(plain, gradients=tensors.gradients)
    sharded = part(tensors.frozen - tensors.packed, sharing.shards, sharing.index)
    return replace(cut, frozen=tensors.packed + sharded, packed=tensors.packed)


def _offload(tensors: Tensors, shard: Tensors, sharing: Sharing, zero: int) -> tuple[Tensors, Tensors]:
    """What stays on the device of a shard, and what goes to the host.

    Gradients follow the update to the host (ZeRO-Offload), in float32 if there are master weights. Under ZeRO-1 the
    device keeps its whole gradients as well: they are reduced once, after the last micro-step.
    """
    gradients = 4 * shard.numel if shard.master else part(tensors.gradients, sharing.shards, sharing.index)
    host = Tensors(gradients=gradients, states=shard.states, master=shard.master, numel=shard.numel)
    left = shard.gradients if zero == 1 else 0
    return replace(shard, gradients=left, states=0, master=0, update=0), host


def gathered(unit: Unit, parallel: ParallelConfig) -> int:
    """The unit's weights made whole, where they are sharded."""
    if parallel.zero < 3:
        return 0
    return sum(_weights(tensors) for sharing, tensors in unit if sharing.shards > 1)


def unreduced(unit: Unit, parallel: ParallelConfig) -> int:
    """The unit's gradients, where the device does not keep them whole."""
    if parallel.zero == 1:
        return 0
    return sum(t.gradients for sharing, t in unit if sharing.shards > 1 or parallel.offload != "none")


def bucket(trained: Tensors, parallel: ParallelConfig) -> int:
    """What gradients are gathered in to be sent."""
    return reduce_bucket(parallel, trained.numel) * trained.trainable // trained.numel if trained.numel else 0


def collectives(chain: Sequence[Unit], parallel: ParallelConfig, steps: int, *, used_up: bool) -> Iterator[Collective]:
    """Weights gathered and gradients reduced, once for every sharing.

    Args:
        steps: micro-steps of a step.
        used_up: a fused backward updates, so it reduces, in every micro-step.
    """
    p, reductions = parallel, steps if used_up else 1
    for sharing in dict.fromkeys(sharing for unit in chain for sharing, _ in unit):
        groups = [total(t for s, t in unit if s == sharing) for unit in chain]
        n, axis, of = sharing.shards, sharing.axis, sharing.of
        trained = [t.trainable for t in groups]  # a gradient has its weight's dtype
        if n > 1 and p.zero == 3:
            # the head's backward follows its forward; all else is gathered again, a frozen embedding by prefetch
            sizes = [_weights(t) for t in (groups + groups[:-1] if p.reshard else groups)]
            yield ring("all-gather", axis, f"weights{of}", sizes, n, steps)
            yield ring("reduce-scatter", axis, f"gradients{of}", trained, n, steps)
        elif n > 1:
            yield ring("reduce-scatter", axis, f"gradients{of}", trained, n, steps if p.zero == 2 else reductions)
            yield ring("all-gather", axis, f"updated weights{of}", trained, n)
        if sharing.copies > 1:
            reduced = [part(size, n, sharing.index) for size in trained]
            yield ring("all-reduce", "replicate", f"gradients{of}", reduced, sharing.copies, reductions)


def _weights(tensors: Tensors) -> int:
    return tensors.trainable + tensors.frozen - tensors.packed
