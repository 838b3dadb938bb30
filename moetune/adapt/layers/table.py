"""Embedding tables in host memory (`model.embeddings_on: host`): rows are looked up there and copied to the device."""

from typing import Any

import torch
from torch import Tensor, nn

from moetune.compat.torch import HostModule
from moetune.experts.host import empty_on_host, mark_on_host


class HostTable(HostModule, nn.Embedding):
    """A frozen embedding whose table [V, H], a buffer, stays in host memory, pinned where the model is on a GPU.

    Forward returns what `nn.Embedding` returns, on the device of the ids. On a GPU the host waits for the ids, once for
    each lookup: no other way leads from them to rows on the host.
    """

    def names_on_host(self) -> tuple[str, ...]:
        return ("weight",)

    def allocate(self, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """Return the table, for a model on `device`; allocate it uninitialized, in `dtype`, if it is on the meta
        device. Raises `UserError` if the system cannot pin as many bytes."""
        if self.weight.is_meta:
            self.weight = empty_on_host(self.weight.shape, dtype or self.weight.dtype, device)
        return self.weight

    @torch.no_grad()
    def forward(self, input: Tensor) -> Tensor:
        pinned, table = input.is_cuda, self.weight
        ids = mark_on_host(torch.empty(input.shape, dtype=input.dtype, pin_memory=pinned)).copy_(input)
        rows = table.new_empty((ids.numel(), self.embedding_dim), pin_memory=pinned)
        torch.index_select(table, 0, ids.view(-1), out=rows)
        on_device = torch.empty((*input.shape, self.embedding_dim), dtype=table.dtype, device=input.device)
        return on_device.copy_(rows.view(on_device.shape), non_blocking=True)


def keep_on_host(embedding: nn.Embedding) -> None:
    """Make a `HostTable` of an `nn.Embedding` on the meta device, in place.

    A subclass keeps its own forward pass, which must call `super().forward`, and its other tensors, on the device.
    """
    kind, table = type(embedding), embedding.weight.detach()
    del embedding.weight
    embedding.register_buffer("weight", table)
    made: Any = HostTable if kind is nn.Embedding else type(kind.__name__, (kind, HostTable), {})
    embedding.__class__ = made
