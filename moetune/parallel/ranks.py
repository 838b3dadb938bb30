"""One rank's view of the ranks of a run, and its collectives with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from moetune.config.schema import ParallelConfig
from moetune.parallel.coordinates import Coordinates, data_ranks, expert_copies, expert_shards
from moetune.parallel.messages import Message
from moetune.run.placement import EVERYTHING, Placement


@dataclass(frozen=True)
class Ranks:
    """One rank's view.

    Attributes:
        parallel: the layout.
        rank: this rank's number.
        placement: the experts that this rank holds.
        dense: mesh (replicate, fsdp, tp); None for a single rank.
        expert: mesh (copy, shard, ep) of the same ranks, by the experts that they hold.
        data: group of the ranks that see different data and have the same part of every matrix.
    """

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    rank: int = 0
    placement: Placement = EVERYTHING
    dense: DeviceMesh | None = None
    expert: DeviceMesh | None = None
    data: Any = None

    @classmethod
    def join(cls, parallel: ParallelConfig, device_type: str) -> Ranks:
        """Return the view of this process, one of `parallel.ranks` processes of torch.distributed."""
        if parallel.ranks == 1:
            return cls(parallel)
        world = dist.get_world_size()
        assert world == parallel.ranks, f"{world} processes, and parallel: asks for {parallel.ranks} ranks"
        dense = init_device_mesh(
            device_type,
            (parallel.replicate, parallel.fsdp, parallel.tp),
            mesh_dim_names=("replicate", "fsdp", "tp"),
        )
        expert = None
        if parallel.ep > 1:
            shape = (expert_copies(parallel), expert_shards(parallel), parallel.ep)
            expert = init_device_mesh(device_type, shape, mesh_dim_names=("copy", "shard", "ep"))
        data = dense["replicate", "fsdp"]._flatten("data").get_group()
        return cls(parallel, dist.get_rank(), EVERYTHING, dense, expert, data)

    @property
    def is_single(self) -> bool:
        return self.dense is None

    @property
    def coordinates(self) -> Coordinates:
        return Coordinates.of(self.parallel, self.rank)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes and prints for all."""
        return self.rank == 0

    @property
    def data_index(self) -> int:
        """This rank's number among those that see different data."""
        return self.rank // self.parallel.tp

    @property
    def data_size(self) -> int:
        return data_ranks(self.parallel)

    def copies(self, tensor: Tensor, *, of_expert: bool) -> int:
        """Number of ranks that hold the same part of a parameter."""
        parts = self.parallel.ep if of_expert else 1
        if isinstance(tensor, DTensor):
            for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
                parts *= 1 if placement.is_replicate() else size
        return self.parallel.ranks // parts

    def total(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if not self.is_single:
            dist.all_reduce(tensor)
        return tensor

    def total_over_data(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks that see different data, in place."""
        if self.data_size > 1:
            dist.all_reduce(tensor, group=self.data)
        return tensor

    def axis_of(self, sent: Message) -> str:
        """Return the axis of `parallel:` along which a message goes."""
        # axes of the same ranks share a group in torch; only experts communicate all to all
        if sent.kind == "all-to-all":
            return "ep"
        if self.parallel.engine == "deepspeed":  # groups of its own, all of the same ranks
            return "fsdp"
        return self._axes.get(sent.group, sent.group)

    @cached_property
    def _axes(self) -> dict[str, str]:
        """Name of torch's process group -> axis."""
        if self.dense is None or dist.group.WORLD is None:
            return {}
        groups = {dist.group.WORLD.group_name: "all", self.data.group_name: "data"}
        if self.expert is not None:
            named = {"ep": "ep", "copy": "replicate", "shard": "efsdp"}
            groups |= {self.expert.get_group(dim).group_name: axis for dim, axis in named.items()}
        sizes = zip(("replicate", "fsdp", "tp"), self.dense.shape, strict=True)
        return groups | {self.dense.get_group(axis).group_name: axis for axis, size in sizes if size > 1}

    def reduce(self, gradients: Mapping[nn.Parameter, Tensor], experts: Collection[nn.Parameter]) -> None:
        """Sum in place the gradients that no engine reduces: those of parameters that are whole on this rank.

        Args:
            experts: the parameters of experts.
        """
        if self.is_single:
            return
        for parameter, gradient in gradients.items():
            if isinstance(parameter, DTensor) and self._is_reduced(parameter):
                continue
            if self.expert is None or parameter not in experts:
                self.total_over_data(local_tensor(gradient))
            elif expert_copies(self.parallel) > 1:
                dist.all_reduce(gradient, group=self.expert.get_group("copy"))

    @staticmethod
    def _is_reduced(parameter: DTensor) -> bool:
        """Whether FSDP2 shards a parameter and reduces its gradients; tensor parallelism alone does not count."""
        names = parameter.device_mesh.mesh_dim_names or ()
        return "fsdp" in names or "shard" in names

    def gather(self, value: Any) -> list[Any]:
        """Return the value of each rank, in order."""
        if self.is_single:
            return [value]
        said: list[Any] = [None] * self.parallel.ranks
        dist.all_gather_object(said, value)
        return said

    def any(self, mine: bool) -> bool:
        """Whether it is true on any rank."""
        return any(self.gather(mine))

    def barrier(self) -> None:
        if not self.is_single:
            dist.barrier()


SINGLE_RANK = Ranks()
"""The rank of a run without others."""


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without a copy."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor
