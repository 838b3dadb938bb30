"""What the expert banks of one model are given from outside: one object, which they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from moetune.experts.host import ExpertPrefetcher

if TYPE_CHECKING:
    from moetune.experts.bank import ExpertBank
    from moetune.experts.dense import DenseWeights

CountRows = Callable[[int, Tensor, int], list[int]]
"""(a layer's index, its chosen experts [T, K], E) -> the rows of each of its E experts, which sum to T·K."""

ExpertWatch = Callable[[Sequence[int]], None]

NormWatch = Callable[[int, Tensor], None]
"""(a layer's index, ‖expert output‖₂ of each choice [T, K] in float32, before it is weighted)"""

GradientHook = Callable[[nn.Parameter, Tensor], None]
"""(a parameter, its gradient)"""


def read_rows(layer: int, ids: Tensor, num_experts: int) -> list[int]:
    """What the ids say: the host waits for one copy."""
    return occurrences(ids, num_experts).tolist()


def occurrences(ids: Tensor, num_experts: int) -> Tensor:
    """How often each of E numbers occurs: [E], int64. `bincount` would make the host wait for the largest number."""
    ids = ids.flatten().long()
    return torch.zeros(num_experts, dtype=torch.int64, device=ids.device).scatter_add_(
        0, ids, ids.new_ones(1).expand_as(ids)
    )


class Exchange(Protocol):
    """Brings every token to its experts' ranks, and its results back (parallel/exchange.py)."""

    def __call__(self, bank: ExpertBank, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor: ...


@dataclass
class BankLinks:
    """What surrounds the banks of one model.

    The last four are for who watches a run, and may change while it goes on: `counting_by`, `eager_gradients_to`,
    `watching_experts` and `watching_norms`.
    They are fields, because autograd runs a GPU's backward pass on a thread of its own, which sees no context variable.

    Attributes:
        expert_memory: bytes that a group's unpacked matrices may take, one of each expert at a time; a group has one
            expert at least.
        keep_rows: whether forward keeps the gate_up rows [T·K, O] that backward would compute again.
        gate_up_apart: whether an expert's gate and up are packed each by itself, as in checkpoints that hold them so.
        prefetcher: brings packed experts from the host; None where they are on the device.
        exchange: None where every rank holds all experts.
        dense: under `train.dense_router_gradient`, the weights of experts that are not chosen.
        count_rows: how many rows each expert receives: the one number of a step that shapes depend on. Read from the
            ids, unless there is an assumption in their place, or a recorder.
        eager_gradient_hook: takes each gradient of a fully trained matrix in backward, as soon as it is there; None
            leaves them to autograd, which keeps all of a layer's until its backward is through.
        expert_watch: is told which experts' rows are computed next, in forward and in backward; none: no one's.
        norm_watch: is told after a layer's forward pass how long its experts' outputs were.
    """

    expert_memory: int = 0
    keep_rows: bool = False
    gate_up_apart: bool = False
    prefetcher: ExpertPrefetcher | None = None
    exchange: Exchange | None = None
    dense: DenseWeights | None = None
    count_rows: CountRows = read_rows
    eager_gradient_hook: GradientHook | None = None
    expert_watch: ExpertWatch | None = None
    norm_watch: NormWatch | None = None

    def room_for_norms(self, like: Tensor) -> Tensor | None:
        """Float32 in the shape of ids, for the norms of their experts' outputs; None if no one asks for them."""
        return None if self.norm_watch is None else torch.empty(like.shape, dtype=torch.float32, device=like.device)

    @contextmanager
    def counting_by(self, count_rows: CountRows) -> Iterator[None]:
        """Inside, rows are counted so."""
        before, self.count_rows = self.count_rows, count_rows
        try:
            yield
        finally:
            self.count_rows = before

    @contextmanager
    def eager_gradients_to(self, hook: GradientHook) -> Iterator[None]:
        """Inside, the hook takes gradients as they come."""
        assert self.eager_gradient_hook is None, "gradients have one taker at a time"
        self.eager_gradient_hook = hook
        try:
            yield
        finally:
            self.eager_gradient_hook = None

    @contextmanager
    def watching_experts(self, watch: ExpertWatch) -> Iterator[None]:
        """Inside, `watch` is told of each group."""
        self.expert_watch = watch
        try:
            yield
        finally:
            self.expert_watch = None

    @contextmanager
    def watching_norms(self, watch: NormWatch) -> Iterator[None]:
        """Inside, `watch` is told of each layer's outputs. Forward passes without gradients only."""
        self.norm_watch = watch
        try:
            yield
        finally:
            self.norm_watch = None
