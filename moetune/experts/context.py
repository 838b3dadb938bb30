"""The state that the expert banks of a model share: constant settings, and hooks that may be replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from moetune.experts.dense import DenseWeights
from moetune.experts.host import ExpertPrefetcher

CountRows = Callable[[int, Tensor, int], list[int]]
"""(layer index, chosen experts [T, K], E) -> the rows of each of E experts; they sum to T·K."""

CountReceived = Callable[[Tensor, list[list[int]], int], list[list[int]]]
"""(receive counts [R, L] on the device, send counts [R][L], this rank) -> receive counts on the host."""


def read_rows(layer: int, ids: Tensor, num_experts: int) -> list[int]:
    """Count the ids. The host waits for one copy."""
    return occurrences(ids, num_experts).tolist()


def occurrences(ids: Tensor, num_experts: int) -> Tensor:
    """How often each of E numbers occurs: [E], int64. `bincount` would make the host wait for the largest number."""
    ids = ids.flatten().long()
    return torch.zeros(num_experts, dtype=torch.int64, device=ids.device).scatter_add_(
        0, ids, ids.new_ones(1).expand_as(ids)
    )


def read_received(receive_RL: Tensor, send_counts: list[list[int]], rank: int) -> list[list[int]]:
    """Read the receive counts. The host waits for one copy."""
    return receive_RL.tolist()


def received_as_sent(receive_RL: Tensor, send_counts: list[list[int]], rank: int) -> list[list[int]]:
    """Assume that every rank sends what this one sends."""
    return [send_counts[rank]] * len(send_counts)


@dataclass
class ExpertHooks:
    """What a run, a prediction or a recorder may replace in the experts of a model, for a while (`using`).

    These are attributes and not context variables: autograd runs a GPU's backward pass on a thread of its own, which
    sees no context variable.

    Attributes:
        count_rows: rows per expert, the one number of a step that shapes depend on. Read from the ids, unless a
            prediction assumes it.
        count_received: rows per expert from each rank, under expert parallelism. Read likewise.
        gradient: called in backward with each fully trained matrix and its gradient, as soon as that is complete;
            without it autograd keeps the gradients of a layer until its backward pass is over.
        group: called with the ids of the experts that are computed next, in forward and backward, and with () after.
        norms: called after a forward pass without gradients with the layer's index and the norms of its experts'
            outputs before weighting: ‖expert output‖₂ of each choice, [T, K] in float32.
    """

    count_rows: CountRows = read_rows
    count_received: CountReceived = read_received
    gradient: Callable[[nn.Parameter, Tensor], None] | None = None
    group: Callable[[Sequence[int]], None] | None = None
    norms: Callable[[int, Tensor], None] | None = None

    @contextmanager
    def using(self, **hooks: Any) -> Iterator[None]:
        """Replace hooks, by name, within the `with` block."""
        before = {name: getattr(self, name) for name in hooks}
        self.__dict__.update(hooks)
        try:
            yield
        finally:
            self.__dict__.update(before)


class Dispatched(NamedTuple):
    """Rows that this rank's experts received.

    Attributes:
        rows_SH: the tokens' rows [S, H].
        slots_S1: the expert of each, by its position among this rank's [S, 1]; `counts` rows of each.
        state: what the dispatcher needs to send the results back.
    """

    rows_SH: Tensor
    slots_S1: Tensor
    counts: list[int]
    state: Any


class Dispatcher(Protocol):
    """Sends tokens to the ranks of their experts, and the results back (parallel/dispatch.py)."""

    def dispatch(
        self, layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, hooks: ExpertHooks
    ) -> Dispatched: ...

    def combine(self, output_SH: Tensor, state: Any) -> Tensor: ...

    def combine_norms(self, norms_S: Tensor, state: Any) -> Tensor: ...


@dataclass(frozen=True)
class ExpertContext:
    """Settings of the banks of one model.

    Attributes:
        expert_memory: bytes for the dequantized matrices of a group, one of each expert at a time; a group has at least
            one expert.
        keep_rows: keep the gate_up rows [T·K, O] of the forward pass, which backward would otherwise recompute.
        split_gate_up: quantize gate and up separately, as checkpoints that store them so do.
        prefetcher: copies quantized experts from the host; None where they are on the device.
        dispatcher: None where every rank holds all experts.
        dense: weights of the experts that are not chosen, under `train.dense_router_gradient`.
    """

    expert_memory: int = 0
    keep_rows: bool = False
    split_gate_up: bool = False
    prefetcher: ExpertPrefetcher | None = None
    dispatcher: Dispatcher | None = None
    dense: DenseWeights | None = None
    hooks: ExpertHooks = field(default_factory=ExpertHooks)
