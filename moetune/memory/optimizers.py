"""What an optimizer keeps of what trains, and takes while it updates, in closed form."""

from __future__ import annotations

import math
from typing import NamedTuple

from moetune.config import OptimizerConfig, Part, RunConfig
from moetune.memory.quantities import Tensors
from moetune.step.lomo import BLOCK

_BLOCK_8BIT = 256  # elements that share a scale
_SMALLEST_8BIT = 4096  # elements; smaller tensors keep float32 states
_MOMENTS_8BIT = {"adamw8bit": 2, "paged_adamw8bit": 2, "lion8bit": 1, "ademamix8bit": 3}
STATE_FORMULAS = {  # their papers: docs/concepts/optimizers.md
    "adamw": "2·b·n: two moments in the dtype that is updated",
    "paged_adamw": "8·n: two float32 moments",
    "adamw8bit": "2·(n + 4·⌈n/256⌉); 8·n for tensors below 4,096 elements",
    "paged_adamw8bit": "2·(n + 4·⌈n/256⌉); 8·n for tensors below 4,096 elements",
    "lion8bit": "n + 4·⌈n/256⌉; 4·n for tensors below 4,096 elements",
    "ademamix8bit": "3·(n + 4·⌈n/256⌉); 12·n for tensors below 4,096 elements",
    "adafactor": "4·(R + C) a matrix [R, C]; 4·n for vectors",
    "adalomo": "4·(R + C) a matrix [R, C]; 4·n for vectors",
    "sgd": "b·n: momentum",
    "lomo": "0",
}


class PartOptimizers(NamedTuple):
    """Each part's optimizer; None where it has none."""

    router: OptimizerConfig | None
    experts: OptimizerConfig | None
    lora: OptimizerConfig | None
    other: OptimizerConfig | None

    @classmethod
    def of(cls, config: RunConfig) -> PartOptimizers:
        return cls(*(config.optimizers.get(part) for part in cls._fields))  # type: ignore[call-overload]

    def fused(self) -> frozenset[str]:
        """The parts whose gradients are used up as they come."""
        return frozenset(
            name
            for name, optimizer in zip(self._fields, self, strict=True)
            if optimizer is not None and (optimizer.fused_backward or optimizer.offload)
        )

    def saved(self, part: Part, shape: tuple[int, ...], width: int) -> int:
        """Bytes of a parameter in a checkpoint: itself, its master weights and its states."""
        taken, numel = self.trained(part, shape, width), math.prod(shape)
        on_host = taken.host_update - (4 + width) * numel if taken.host_update else 0  # without gradient and wire
        return taken.trainable + taken.master + taken.states + on_host

    def while_used_up(self, part: Part, shape: tuple[int, ...], width: int) -> int:
        """What there is beside a gradient that is used up as it comes: its update, or the one before it, which is still
        on its way to the host."""
        optimizer = getattr(self, part)
        if optimizer.offload:
            return math.prod(shape) * width
        copied = optimizer.master_weights != "none" and width < 4
        return _update_bytes(optimizer, shape, width, copied=copied)

    def trained(self, part: Part, shape: tuple[int, ...], width: int, stacked: int = 1) -> Tensors:
        """What a parameter takes in all, or, of one that stacks `stacked` of this shape, one's share.

        Mixed-precision Adam is 2 + 2 + 4 + 4 + 4 = 16 bytes a parameter (ZeRO, arXiv 1910.02054, section 3.1): weight,
        gradient, and in float32 master copy and two moments. Without a master copy torch keeps the moments in the
        parameter's own dtype.
        """
        optimizer = getattr(self, part)
        numel = math.prod(shape)
        if optimizer is None:
            return Tensors(trainable=numel * width, numel=numel)
        if optimizer.offload:  # states; float32 weights and gradient; what goes over the bus
            whole = numel * stacked * width
            host = _state_bytes(optimizer, shape, 4, stacked) + 8 * numel + width * numel
            return Tensors(trainable=numel * width, numel=numel, host_update=host, alone=whole, leaving=whole)
        copied = optimizer.master_weights != "none" and width < 4
        whole = numel * stacked
        update = _update_bytes(optimizer, (stacked * shape[0], *shape[1:]), width, copied=copied)
        return Tensors(
            trainable=numel * width,
            gradients=0 if optimizer.fused_backward else numel * width,
            states=_state_bytes(optimizer, shape, 4 if copied else width, stacked),
            master=4 * numel if copied and optimizer.master_weights == "fp32" else 0,
            numel=numel,
            update=0 if optimizer.fused_backward else update,
            alone=whole * width + update if optimizer.fused_backward else 0,
        )


NO_OPTIMIZERS = PartOptimizers(None, None, None, None)


def _state_bytes(optimizer: OptimizerConfig, shape: tuple[int, ...], width: int, stacked: int) -> int:
    numel = math.prod(shape)
    if optimizer.name in _MOMENTS_8BIT:
        moments = _MOMENTS_8BIT[optimizer.name]
        is_small = numel * stacked < _SMALLEST_8BIT
        return moments * (4 * numel if is_small else numel + 4 * -(-numel // _BLOCK_8BIT))
    match optimizer.name:
        case "adamw":
            return 2 * numel * width + (4 if stacked == 1 else 0)  # and a step count
        case "paged_adamw":
            return 8 * numel
        case "adafactor" | "adalomo":
            return 4 * (sum(shape[-2:]) * math.prod(shape[:-2]) if len(shape) > 1 else numel)
        case "sgd":
            return numel * width if optimizer.momentum else 0
    return 0


def _update_bytes(optimizer: OptimizerConfig, shape: tuple[int, ...], width: int, *, copied: bool) -> int:
    """What one update takes beside the gradient: float32 copies of 16-bit gradients and, where none is kept, weights;
    blocks that LOMO and its kin have in float32."""
    numel = math.prod(shape)
    kept = {"fp32": 4, "stochastic": 8}.get(optimizer.master_weights, 0) * numel if copied else 0
    width = 4 if copied else width
    rows = max(1, BLOCK * shape[0] // numel)
    block = 4 * min(numel, rows * numel // shape[0])
    copies = 2 if width == 4 else 3
    blocks = {"lomo": 1 if width == 4 else 3, "adalomo": copies, "adafactor": copies}
    return kept + blocks.get(optimizer.name, 0) * block
