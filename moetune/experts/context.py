"""State that all expert banks of a model share: constant settings, and replaceable hooks."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn

from moetune.experts.dense import DenseWeights
from moetune.experts.host import ExpertPrefetcher
from moetune.formats.rounding import Rounding

Kind = Literal["trained", "lora", "frozen"]
"""How an expert trains; experts of different kinds are never computed together."""

ReadCounts = Callable[[], list[int]]
"""Function that returns how often each of E experts was chosen, copied from the device; the host waits."""

CountRows = Callable[[int, Tensor, int, ReadCounts], list[int]]
"""Function of (layer index, chosen expert ids [T, K], number E of experts, function that reads the counts) that returns
the number of rows of each expert: E integers whose sum is T·K."""

CountReceived = Callable[[Tensor, list[list[int]], int], list[list[int]]]
"""Function of (receive counts [R, L] on the device, send counts [R][L] on the host, this rank's index)
that returns the receive counts [R][L] on the host. R ranks share the experts and have L experts each; element (r, l) of
the receive counts is the number of rows that rank r sends to expert l of this rank."""


def read_rows(layer: int, ids: Tensor, num_experts: int, read: ReadCounts) -> list[int]:
    """Return `read()`, the true number of rows of each expert: the default of `ExpertHooks.count_rows`.

    The other arguments are for functions in its place that assume or record numbers.
    """
    return read()


def reading(ends: Tensor, order: Sequence[int], rows: int) -> ReadCounts:
    """Return a function that copies counts to the host, waiting for the device, and returns them by expert id.

    Args:
        ends: [E], the cumulative sums of the experts' numbers of rows, from `sorted_positions`.
        order: for each expert id, the index of its count.
        rows: the sum of the counts.
    """

    def read() -> list[int]:
        by_place = listed(ends, rows)
        return [by_place[place] for place in order]

    return read


def listed(ends: Tensor, rows: int) -> list[int]:
    """Return the counts whose cumulative sums are `ends` [E]; the host waits for the device.

    `rows`, their sum, is not used. It is for a replacement where tensors have no values, which must invent counts.
    """
    return [end - start for start, end in pairwise([0, *ends.tolist()])]


def read_received(receive_RL: Tensor, send_counts: list[list[int]], rank: int) -> list[list[int]]:
    """Return the receive counts as lists [R][L], for which the host waits: the default of `ExpertHooks.count_received`.

    The other arguments are for functions in its place that assume numbers.
    """
    return receive_RL.tolist()


def received_as_sent(receive_RL: Tensor, send_counts: list[list[int]], rank: int) -> list[list[int]]:
    """Return receive counts [R][L] for a trace, in which every rank sends this rank what this rank sends to itself."""
    return [send_counts[rank]] * len(send_counts)


@dataclass
class ExpertHooks:
    """Callbacks and flags of a model's experts, which a run, a prediction or a recorder replaces temporarily.

    They are attributes and not context variables, because autograd runs the backward pass of a GPU on another thread,
    where context variables of the caller are not set.

    Attributes:
        count_rows: returns the number of rows of each expert, the only tensor values that shapes of a step depend on.
            By default reads the counts; a prediction returns assumed numbers. Not called for a layer whose shapes do
            not depend on them (`ExpertBank.counts_rows`).
        count_received: under expert parallelism, returns the number of rows that each rank sends for each expert of
            this rank. By default reads the exchanged counts; a prediction returns assumed numbers.
        gradient: called in backward with each fully trained parameter of an expert and its gradient, as soon as the
            gradient is complete. None to return gradients to autograd when the layer's backward is done.
        group: called in forward and backward with the ids of the experts that are computed next, and with () after the
            last group; None for no calls.
        is_written: called before a group is computed, with the bank, the kind of its experts and their numbers of rows:
            groups for which these are equal allocate and compute alike. If it returns True, the group is not computed,
            because a trace has written what it allocates. None to compute every group.
        norms: called after a forward pass with the layer's index and the L2 norms of the experts' outputs before
            weighting, [T, K] in float32; to be set only without gradients. None for no calls.
        recomputes: whether the forward pass is the recomputation of a checkpointed layer, which does not save gate_up
            rows (`ExpertContext.keep_rows`).
        without_lora: run experts as if they had no LoRA; without gradients only.
    """

    count_rows: CountRows = read_rows
    count_received: CountReceived = read_received
    gradient: Callable[[nn.Parameter, Tensor], None] | None = None
    group: Callable[[Sequence[int]], None] | None = None
    is_written: Callable[[Any, Kind, Sequence[int]], bool] | None = None
    norms: Callable[[int, Tensor], None] | None = None
    recomputes: bool = False
    without_lora: bool = False

    @contextmanager
    def using(self, **hooks: Any) -> Iterator[None]:
        """Replace the named hooks within the `with` block."""
        before = {name: getattr(self, name) for name in hooks}
        self.__dict__.update(hooks)
        try:
            yield
        finally:
            self.__dict__.update(before)


class Dispatched(NamedTuple):
    """Token rows that this rank received for its experts, and from which `Dispatcher` sends the results back.

    Attributes:
        rows_SH: the rows [S, H].
        slots_S1: [S, 1], the expert of each row, as its position among the experts that this rank stores.
        counts: number of rows of each of these experts.
        weights_TK: routing weights of the tokens that this rank sent.
        order: [T·K] flat positions token·K + choice of the sent rows, in the order of sending.
        sends, receives: numbers of rows sent to, and received from, each of the ranks.
        tokens: number of this rank's tokens before tensor-parallel ranks divided them.
    """

    rows_SH: Tensor
    slots_S1: Tensor
    counts: list[int]
    weights_TK: Tensor
    order: Tensor
    sends: list[int]
    receives: list[int]
    tokens: int


class Dispatcher(Protocol):
    """Interface that sends token rows to the ranks of their experts and the results back (parallel/dispatch.py).

    `dispatch` sends rows [T, H] to the ranks of the experts `ids_TK` and returns the rows that this rank receives.
    `combine` sends the experts' results [S, H] back and returns each token's weighted sum [T, H]. `combine_norms` sends
    the norms [S] of these results back and returns them as [T, K]. Both take what `dispatch` returned. All ranks
    must make the same calls.
    """

    def dispatch(
        self, layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, hooks: ExpertHooks
    ) -> Dispatched: ...

    def combine(self, output_SH: Tensor, received: Dispatched) -> Tensor: ...

    def combine_norms(self, norms_S: Tensor, received: Dispatched) -> Tensor: ...


@dataclass(frozen=True)
class ExpertContext:
    """Settings that all expert banks of a model share.

    Attributes:
        expert_memory: bytes that the dequantized weights of a group of experts may take. The gate_up and down matrices
            are dequantized one after the other, so each counts alone; a group has at least one expert.
        keep_rows: layers whose gate_up rows [T·K, O] of forward are kept for backward, instead of being recomputed.
        split_gate_up: quantize gate and up separately, as checkpoints that store them as separate tensors do.
        prefetcher: copies quantized experts from host memory to the device; None if they are stored on the device.
        dispatcher: sends tokens to other ranks; None if this rank stores all experts.
        rounding: how experts' weights are rounded under `train.merge_into`; None without it.
        dense: routing weights of experts that were not chosen, under `train.dense_router_gradient`; None without it.
        capability: CUDA compute capability of the GPU; None for a CPU.
        hooks: callbacks of the experts.
    """

    expert_memory: int = 0
    keep_rows: Collection[int] = ()
    split_gate_up: bool = False
    rounding: Rounding | None = None
    prefetcher: ExpertPrefetcher | None = None
    dispatcher: Dispatcher | None = None
    dense: DenseWeights | None = None
    capability: tuple[int, int] | None = None
    hooks: ExpertHooks = field(default_factory=ExpertHooks)
