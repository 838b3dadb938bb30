"""Expert parallelism: token rows go to the ranks that store their experts, results return.

The rows are exchanged in an all-to-all, as in transformers' `AllToAllEP`. Unlike there, an expert may be on any rank, a
prediction can replace the send and receive counts, and experts run even if they receive no rows.

Shapes: T tokens of this rank, K chosen experts per token, E experts of the layer, R ranks that share them, L = E/R
experts per rank, S rows received by this rank, H hidden size.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from moetune.compat.torch import all_to_all
from moetune.experts.context import Dispatched, ExpertHooks, reading
from moetune.kernels.routing import sorted_positions


class TokenDispatcher:
    """The `Dispatcher` of all expert banks of a model.

    Args:
        placement: layer index -> the expert ids of each of the R ranks.
        trained: indices of the layers in which some rank trains experts. Rows of these layers get a gradient on every
            rank, even one that trains nothing, because the backward all-to-all needs all ranks.
        ep: one-dimensional mesh of the R ranks.
        tp: one-dimensional mesh of the tensor-parallel ranks, which have the same tokens.
    """

    def __init__(
        self,
        placement: Mapping[int, Sequence[Sequence[int]]],
        trained: Collection[int],
        ep: DeviceMesh,
        tp: DeviceMesh,
    ) -> None:
        self._ep, self._tp, self._trained = ep, tp, trained
        # layer index -> ids of all experts, those of the first rank first
        self._order = {layer: [expert for held in of_ranks for expert in held] for layer, of_ranks in placement.items()}
        # layer index -> for each expert its place in that order
        self._places = {layer: sorted(range(len(order)), key=order.__getitem__) for layer, order in self._order.items()}
        self._positions = {
            layer: torch.tensor(places, device=ep.device_type)  # on the device of the tokens
            for layer, places in self._places.items()
        }

    def dispatch(
        self, layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, hooks: ExpertHooks
    ) -> Dispatched:
        """Send each token's row to the ranks of its K experts; return the rows that this rank receives.

        All R ranks must call it. Differentiable in `hidden_TH`.

        Args:
            layer: index of the decoder layer.
            hidden_TH: token rows.
            ids_TK, weights_TK: ids of each token's experts, and routing weights, which `combine` applies.
            hooks: its `count_rows` and `count_received` give the numbers of rows to send and to receive.
        """
        if layer in self._trained and torch.is_grad_enabled() and not hidden_TH.requires_grad:
            hidden_TH = hidden_TH.detach().requires_grad_()
        tokens = len(hidden_TH)
        if self._tp.size() > 1:  # these ranks have the same tokens, so each sends a slice of the rows
            hidden_TH, ids_TK, weights_TK = (
                DTensor.from_local(tensor, self._tp, [Replicate()], run_check=False)
                .redistribute(self._tp, [Shard(0)])
                .to_local()
                for tensor in (hidden_TH, ids_TK, weights_TK)
            )
        group, ranks, top_k, experts = self._ep.get_group(), self._ep.size(), ids_TK.shape[-1], self._order[layer]
        held = len(experts) // ranks
        places, rows = self._positions[layer][ids_TK.flatten()], ids_TK.numel()
        order, ends_E = sorted_positions(places, len(experts))
        read = reading(ends_E, self._places[layer], rows)
        counts = hooks.count_rows(layer, ids_TK, len(experts), read)
        send_counts = [[counts[e] for e in experts[r * held : (r + 1) * held]] for r in range(ranks)]
        send_RL = torch.tensor(send_counts, device=hidden_TH.device)
        receive_RL = torch.empty_like(send_RL)
        dist.all_to_all_single(receive_RL, send_RL, group=group)
        receive_counts = hooks.count_received(receive_RL, send_counts, self._ep.get_local_rank())

        sends, receives = [sum(row) for row in send_counts], [sum(row) for row in receive_counts]
        rows_SH = all_to_all(hidden_TH[order // top_k], receives, sends, group)
        held_RL = torch.arange(held, device=ids_TK.device).repeat(ranks)
        rows_RL = torch.tensor(receive_counts, device=ids_TK.device).flatten()
        held_S = held_RL.repeat_interleave(rows_RL, output_size=sum(receives))
        by_expert = [sum(row[expert] for row in receive_counts) for expert in range(held)]
        return Dispatched(rows_SH, held_S[:, None], by_expert, weights_TK, order, sends, receives, tokens)

    def combine(self, output_SH: Tensor, received: Dispatched) -> Tensor:
        """Send results [S, H] back; return the weighted sum for each of this rank's tokens, [T, H].

        All R ranks must call it, with what their call of `dispatch` returned.
        """
        rows = all_to_all(output_SH, received.sends, received.receives, self._ep.get_group())
        by_choice = torch.empty_like(rows)
        by_choice[received.order] = rows
        by_choice = by_choice.view(*received.weights_TK.shape, output_SH.shape[-1])
        return self._gathered((by_choice * received.weights_TK.unsqueeze(-1)).sum(dim=1), received.tokens)

    def combine_norms(self, norms_S: Tensor, received: Dispatched) -> Tensor:
        """Send norms [S] of the experts' outputs back to the tokens' ranks; return [T, K]. Not differentiable."""
        returned, norms = norms_S.new_empty(2, len(received.order))
        dist.all_to_all_single(returned, norms_S, received.sends, received.receives, self._ep.get_group())
        norms[received.order] = returned
        return self._gathered(norms.view(received.weights_TK.shape), received.tokens)

    def _gathered(self, rows: Tensor, tokens: int) -> Tensor:
        """Gather the rows of a tensor that is divided over the tensor-parallel ranks; return all T = `tokens` rows."""
        if self._tp.size() == 1:
            return rows
        shape, stride = torch.Size((tokens, rows.shape[1])), (rows.shape[1], 1)
        return DTensor.from_local(rows.contiguous(), self._tp, [Shard(0)], shape=shape, stride=stride).full_tensor()
