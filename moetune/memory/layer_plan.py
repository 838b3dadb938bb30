"""What decides a decoder layer's activations, beside its sizes: the run, what trains in it, where its experts are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moetune.memory.optimizers import NO_OPTIMIZERS, PartOptimizers

Needs = frozenset[str]
"""Names of what trains, or needs a gradient."""


@dataclass(frozen=True)
class Run:
    """What of a run file shapes a layer's activations.

    Attributes:
        width: bytes of the compute dtype.
        base, nested: precision of what is packed, and whether its scales are.
        rank, split: of LoRA factors; `split` gives an expert's gate and up an A each.
        batch, sequence: of a micro-batch.
        eager: attention that writes its scores down.
        checkpointed: whether a layer's forward pass keeps its input and its routers' choices only.
        on_host: whether packed experts stay on the host.
        keeps_rows: whether the experts' rows of gate_up are kept for backward.
        optimizers: of each part.
    """

    width: int
    base: str
    nested: bool
    rank: int
    split: bool
    batch: int
    sequence: int
    eager: bool
    checkpointed: bool
    on_host: bool = False
    keeps_rows: bool = False
    optimizers: PartOptimizers = NO_OPTIMIZERS

    @property
    def fused(self) -> frozenset[str]:
        """Parts whose gradients are used up as they come, and so are not among what is made."""
        return self.optimizers.fused()


class Exchanged(NamedTuple):
    """Of a layer whose experts are spread over ranks: tokens U that this rank sends to their experts, rows A that
    arrive, experts that are here, and whether any rank's train; whether the tokens are a slice of the micro-batch."""

    tokens: int
    arriving: int
    held: int
    trains: bool
    sliced: bool


@dataclass(frozen=True)
class LayerPlan:
    """What trains in one layer.

    Attributes:
        full: ends of the names of parameters that train whole.
        lora: paths of linear layers with factors.
        experts: how many experts train whole.
        lora_experts: how many have factors.
        input_needs: whether a gradient goes further down.
        rows: N.
        offloads: whether its input waits for backward on the host.
        exchange: None where all experts are here.
    """

    full: Needs
    lora: Needs
    experts: int
    lora_experts: int
    input_needs: bool
    rows: int
    offloads: bool = False
    exchange: Exchanged | None = None
