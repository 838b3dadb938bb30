"""Tokens go to the ranks that hold their experts, and their results come back.

transformers' all-to-all dispatch (`AllToAllEP`) for an expert bank: experts may lie on any rank, how many rows travel
is read in the one place where a prediction can answer it, and each rank's bank works on whatever rows arrive, none
included.

Shapes: T tokens of this rank, K experts a token, E experts of the layer, R ranks that share them, L = E/R slots of a
rank, S rows that arrive here, H model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from moetune.compat.transformers import Dispatcher, Sent
from moetune.experts.bank import ExpertBank
from moetune.experts.routing import Routing, sorted_positions

CountArriving = Callable[[Tensor, list[list[int]], int], list[list[int]]]
"""(rows that arrive [R, L], as a tensor; rows that leave [R][L]; this rank's number) -> rows that arrive, read."""


def read_arriving(arriving_RL: Tensor, leaving: list[list[int]], rank: int) -> list[list[int]]:
    """What the tensor says."""
    return arriving_RL.tolist()


def as_they_leave(arriving_RL: Tensor, leaving: list[list[int]], rank: int) -> list[list[int]]:
    """The assumption that every rank sends what this one sends."""
    return [leaving[rank]] * len(leaving)


class TokenExchange:
    """Of all banks of a model.

    Args:
        placement: by layer, its expert ids on each of the R ranks; a bank holds this rank's.
        trained: the layers whose bank trains on any rank. There rows must carry gradients on every rank, because ranks
            that trained nothing would leave the others waiting in backward.

    Attributes:
        count_arriving: how many rows come from each rank: read, unless there is an assumption in its place, or a
            recorder.
    """

    def __init__(
        self,
        placement: Mapping[int, Sequence[Sequence[int]]],
        trained: Collection[int],
        ep: DeviceMesh,
        tp: DeviceMesh,
    ) -> None:
        self.ep_mesh, self.tp_mesh, self.trained, self.dispatcher = ep, tp, trained, Dispatcher(ep, tp)
        self.count_arriving: CountArriving = read_arriving
        # of all experts, as they lie on the ranks
        self.order = {layer: [expert for held in of_ranks for expert in held] for layer, of_ranks in placement.items()}
        self.positions = {
            layer: torch.tensor([order.index(expert) for expert in range(len(order))], device=ep.device_type)
            for layer, order in self.order.items()  # on the device, where packed experts may not be
        }

    @contextmanager
    def counting_by(self, count_arriving: CountArriving) -> Iterator[None]:
        """Count arriving rows so inside."""
        before, self.count_arriving = self.count_arriving, count_arriving
        try:
            yield
        finally:
            self.count_arriving = before

    def __call__(self, bank: ExpertBank, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if bank.layer in self.trained and torch.is_grad_enabled() and not hidden_TH.requires_grad:
            hidden_TH = hidden_TH.detach().requires_grad_()
        tokens_SH, routing, sent = self._send(bank, hidden_TH, ids_TK, weights_TK)
        norms_S1 = bank.links.room_for_norms(routing.order[:, None])
        output_SH = bank.run(tokens_SH, tokens_SH.new_ones(len(tokens_SH), 1), routing, norms_S1)
        if bank.links.norm_watch is not None and norms_S1 is not None:
            bank.links.norm_watch(bank.layer, self._norms_back(norms_S1.flatten(), sent))
        return self.dispatcher.bring_back(output_SH, sent).to(hidden_TH.dtype)

    def _norms_back(self, norms_S: Tensor, sent: Sent) -> Tensor:
        """The norms of experts' outputs to the ranks that sent the tokens: [T, K]."""
        top_k = sent.weights_TK.shape[1]
        returned, norms = norms_S.new_empty(2, len(sent.order))
        dist.all_to_all_single(returned, norms_S, sent.sends, sent.receives, self.ep_mesh.get_group())
        norms[sent.order] = returned
        if self.tp_mesh.size() == 1:
            return norms.view(-1, top_k)
        shape = torch.Size((sent.tokens, top_k))
        sliced = DTensor.from_local(norms.view(-1, top_k), self.tp_mesh, [Shard(0)], shape=shape, stride=(top_k, 1))
        return sliced.full_tensor()

    def _send(
        self, bank: ExpertBank, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Routing, Sent]:
        tokens = len(hidden_TH)
        if self.tp_mesh.size() > 1:  # ranks that have the same tokens send a slice of them each
            hidden_TH, ids_TK, weights_TK = (
                DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
                .redistribute(self.tp_mesh, [Shard(0)])
                .to_local()
                for tensor in (hidden_TH, ids_TK, weights_TK)
            )
        group, ranks, top_k = self.ep_mesh.get_group(), self.ep_mesh.size(), ids_TK.shape[-1]
        all_experts, slots = self.order[bank.layer], bank.num_experts
        counts = bank.links.count_rows(bank.layer, ids_TK, len(all_experts))
        leaving = [[counts[e] for e in all_experts[r * slots : (r + 1) * slots]] for r in range(ranks)]
        leaving_RL = torch.tensor(leaving, device=hidden_TH.device)
        arriving_RL = torch.empty_like(leaving_RL)
        dist.all_to_all_single(arriving_RL, leaving_RL, group=group)
        arriving = self.count_arriving(arriving_RL, leaving, self.ep_mesh.get_local_rank())

        order = sorted_positions(self.positions[bank.layer][ids_TK.flatten()], len(all_experts))
        sends, receives = [sum(row) for row in leaving], [sum(row) for row in arriving]
        rows = all_to_all_single_autograd(hidden_TH[order // top_k], receives, sends, group)
        tokens_SH = self.dispatcher.wait(rows)
        slot_RL = torch.arange(slots, device=ids_TK.device).repeat(ranks)
        rows_RL = torch.tensor(arriving, device=ids_TK.device).flatten()
        slot_S = slot_RL.repeat_interleave(rows_RL, output_size=sum(receives))
        by_slot = [sum(row[slot] for row in arriving) for slot in range(slots)]
        routing = bank.routing(slot_S[:, None], by_slot)
        return tokens_SH, routing, Sent(weights_TK, order, sends, receives, tokens)
