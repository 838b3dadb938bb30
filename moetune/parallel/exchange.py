"""Tokens go to the ranks that hold their experts, and their results come back.

transformers' all-to-all dispatch (`AllToAllEP`) for an expert bank: experts may lie on any rank, how many rows travel
is read in the one place where a prediction can answer it, and each rank's bank works on whatever rows arrive, none
included.

Shapes: T tokens of this rank, K experts a token, E experts of the layer, R ranks that share them, L = E/R slots of a
rank, S rows that arrive here, H model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import AllToAllEP, _AllToAllState, _WaitTensor

from moetune.experts.bank import ExpertBank
from moetune.experts.mlp import Routing, tokens_per_expert

Arriving = Callable[[Tensor, list[list[int]], int], list[list[int]]]
"""(rows that arrive [R, L], as a tensor; rows that leave [R][L]; this rank's number) -> rows that arrive, read."""


def read(arriving_RL: Tensor, leaving: list[list[int]], rank: int) -> list[list[int]]:
    """What the tensor says."""
    return arriving_RL.tolist()


def as_they_leave(arriving_RL: Tensor, leaving: list[list[int]], rank: int) -> list[list[int]]:
    """The assumption that every rank sends what this one sends."""
    return [leaving[rank]] * len(leaving)


_arriving: ContextVar[Arriving] = ContextVar("arriving", default=read)


@contextmanager
def arriving_by(arriving: Arriving) -> Iterator[None]:
    """Inside, `arriving` says how many rows come from each rank: an assumption where tensors have no values."""
    token = _arriving.set(arriving)
    try:
        yield
    finally:
        _arriving.reset(token)


class TokenExchange(AllToAllEP):
    """Of one layer's bank.

    Args:
        placed: the layer's expert ids on each of the R ranks; the bank holds this rank's.
        trains: whether the bank of any rank trains. Then rows must carry gradients on every rank, because ranks that
            trained nothing would leave the others waiting in backward.
    """

    def __init__(
        self, bank: ExpertBank, placed: Sequence[Sequence[int]], ep: DeviceMesh, tp: DeviceMesh, *, trains: bool
    ) -> None:
        super().__init__(bank, ep, tp)
        self.bank, self.trains = bank, trains
        self.order = [expert for held in placed for expert in held]  # of all experts, as they lie on the ranks
        positions = [self.order.index(expert) for expert in range(len(self.order))]
        self.positions = torch.tensor(positions, device=ep.device_type)  # packed experts may be on the host

    def __call__(self, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if self.trains and torch.is_grad_enabled() and not hidden_TH.requires_grad:
            hidden_TH = hidden_TH.detach().requires_grad_()
        tokens_SH, routing, state = self._send(hidden_TH, ids_TK, weights_TK)
        output_SH = self.bank.run(tokens_SH, tokens_SH.new_ones(len(tokens_SH), 1), routing)
        return self._combine_tokens(output_SH, state).to(hidden_TH.dtype)

    def _send(self, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Routing, Any]:
        tokens = len(hidden_TH)
        if self.tp_mesh.size() > 1:  # ranks that have the same tokens send a slice of them each
            hidden_TH, ids_TK, weights_TK = (
                DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
                .redistribute(self.tp_mesh, [Shard(0)])
                .to_local()
                for tensor in (hidden_TH, ids_TK, weights_TK)
            )
        group, ranks, top_k = self.ep_mesh.get_group(), self.ep_mesh.size(), ids_TK.shape[-1]
        counts = tokens_per_expert(ids_TK, len(self.order))
        slots: int = self.bank.num_experts
        leaving = [[counts[e] for e in self.order[r * slots : (r + 1) * slots]] for r in range(ranks)]
        leaving_RL = torch.tensor(leaving, device=hidden_TH.device)
        arriving_RL = torch.empty_like(leaving_RL)
        dist.all_to_all_single(arriving_RL, leaving_RL, group=group)
        arriving = _arriving.get()(arriving_RL, leaving, self.ep_mesh.get_local_rank())

        order = torch.argsort(self.positions[ids_TK.flatten()], stable=True)
        sends, receives = [sum(row) for row in leaving], [sum(row) for row in arriving]
        sent = all_to_all_single_autograd(hidden_TH[order // top_k], receives, sends, group)
        tokens_SH = _WaitTensor.apply(sent)
        slot_RL = torch.arange(slots, device=ids_TK.device).repeat(ranks)
        rows_RL = torch.tensor(arriving, device=ids_TK.device).flatten()
        slot_S = slot_RL.repeat_interleave(rows_RL, output_size=sum(receives))
        by_slot = [sum(row[slot] for row in arriving) for slot in range(slots)]
        routing = Routing(torch.argsort(slot_S, stable=True), by_slot, 1)
        return tokens_SH, routing, _AllToAllState(weights_TK, order, sends, receives, tokens)
