"""`Ranks`: this process's rank, its device meshes and collective operations."""

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

_AXES = ("pp", "replicate", "fsdp", "tp")


@dataclass(frozen=True)
class Ranks:
    """This process's rank in a run, and its collectives with the other ranks.

    All ranks must make the same calls. The sums over ranks do nothing in a run of one rank.

    Attributes:
        parallel: the run's layout.
        rank: number of this rank, from 0.
        placement: the experts that this rank stores.
        dense: device mesh with dimensions (pp, replicate, fsdp, tp); None for a single rank.
        expert: the same ranks as a mesh (copy, shard, ep): ranks along `ep` store different experts, the others the
            same. None if `parallel.ep` is 1.
        data: process group of the ranks that read different data and have the same part of every matrix; None for a
            single rank.
    """

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    rank: int = 0
    placement: Placement = EVERYTHING
    dense: DeviceMesh | None = None
    expert: DeviceMesh | None = None
    data: Any = None

    @classmethod
    def join(cls, parallel: ParallelConfig, device_type: str) -> "Ranks":
        """Return the `Ranks` of this process, with new meshes and every expert in `placement`.

        torch.distributed must be initialized for `parallel.ranks` processes.
        """
        if parallel.ranks == 1:
            return cls(parallel)
        world = dist.get_world_size()
        assert world == parallel.ranks, f"{world} processes, and parallel: asks for {parallel.ranks} ranks"
        dense = init_device_mesh(
            device_type,
            (parallel.pp, parallel.replicate, parallel.fsdp, parallel.tp),
            mesh_dim_names=_AXES,
        )
        expert = None
        if parallel.ep > 1:
            shape = (expert_copies(parallel), expert_shards(parallel), parallel.ep)
            expert = init_device_mesh(device_type, shape, mesh_dim_names=("copy", "shard", "ep"))
        data = dense["replicate", "fsdp"]._flatten("data").get_group()
        return cls(parallel, dist.get_rank(), EVERYTHING, dense, expert, data)

    @property
    def is_single(self) -> bool:
        """Whether the run has only this rank."""
        return self.dense is None

    @property
    def coordinates(self) -> Coordinates:
        """This rank's position on each axis of the layout."""
        return Coordinates.of(self.parallel, self.rank)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and prints for all ranks: rank 0."""
        return self.rank == 0

    @property
    def data_index(self) -> int:
        """This rank's index among the `data_size` parts of the data; tensor-parallel ranks and stages share one."""
        return self.generator % self.data_size

    @property
    def generator(self) -> int:
        """A number for ranks that draw the same random numbers: those that differ in `tp` only."""
        return self.rank // self.parallel.tp

    @property
    def data_size(self) -> int:
        """Number of parts that the data of a step are divided into."""
        return data_ranks(self.parallel)

    def copies(self, tensor: Tensor, *, of_expert: bool) -> int:
        """Return how many ranks store the same part of a parameter or of its gradient (`tensor`).

        Sharded ones are DTensors. What belongs to experts (`of_expert`) is stored by only 1/`ep` of the ranks.
        """
        parts = self.parallel.pp * (self.parallel.ep if of_expert else 1)
        if isinstance(tensor, DTensor):
            for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
                parts *= 1 if placement.is_replicate() else size
        return self.parallel.ranks // parts

    def total(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks in place, and return it."""
        if not self.is_single:
            dist.all_reduce(tensor)
        return tensor

    def total_over_data(self, tensor: Tensor) -> Tensor:
        """Sum a tensor in place over the ranks that read different data, and return it."""
        if self.data_size > 1:
            dist.all_reduce(tensor, group=self.data)
        return tensor

    def total_over_stages(self, tensor: Tensor) -> Tensor:
        """Sum a tensor in place over the stages of the pipeline that read this rank's data, and return it."""
        if self.parallel.pp > 1 and self.dense is not None:
            dist.all_reduce(tensor, group=self.dense.get_group("pp"))
        return tensor

    def of_all_stages(self, by_layer: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the tensors of the layers of all stages, by layer, on each of them; every rank must call this."""
        if self.parallel.pp == 1:
            return dict(by_layer)
        device = next((tensor.device for tensor in by_layer.values()), None)
        layers: dict[int, Tensor] = {}
        for of_rank in self.gather({layer: tensor.cpu() for layer, tensor in by_layer.items()}):
            layers |= of_rank
        return {layer: layers[layer].to(device) for layer in sorted(layers)}

    def axis_of(self, sent: Message) -> str:
        """Return the axis of the layout along which a message goes; for an unknown process group, its name in torch.

        Axes are "ep", "pp", "fsdp", "tp", "replicate", "efsdp" (ranks that shard the same experts), "data" (ranks that
        read different data) and "all".
        """
        # axes with the same ranks share a process group in torch; only the experts use all-to-all, only stages send
        if sent.kind == "point-to-point":
            return "pp"
        if sent.kind == "all-to-all":
            return "ep"
        if self.parallel.engine == "deepspeed":  # it makes its own groups, each with all ranks
            return "fsdp"
        return self._axes.get(sent.group, sent.group)

    @cached_property
    def _axes(self) -> dict[str, str]:
        """Name of torch's process group -> axis."""
        if self.dense is None or dist.group.WORLD is None:
            return {}
        groups: dict[str, str] = {self.dense.get_group("pp").group_name: "pp"}
        groups |= {dist.group.WORLD.group_name: "all", self.data.group_name: "data"}
        if self.expert is not None:
            named = {"ep": "ep", "copy": "replicate", "shard": "efsdp"}
            groups |= {self.expert.get_group(dim).group_name: axis for dim, axis in named.items()}
        sizes = zip(_AXES[1:], self.dense.shape[1:], strict=True)
        return groups | {self.dense.get_group(axis).group_name: axis for axis, size in sizes if size > 1}

    def reduce(self, gradients: Mapping[nn.Parameter, Tensor], experts: Collection[nn.Parameter]) -> None:
        """Sum each parameter's gradient over ranks in place, except those that FSDP2 reduces.

        Gradients are summed over the ranks with different data; under expert parallelism those of `experts`, the
        parameters that belong to experts, only over the ranks that store the same experts.
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
        """Return whether FSDP2 shards a parameter, and so reduces its gradients; False for tensor parallelism alone."""
        names = parameter.device_mesh.mesh_dim_names or ()
        return "fsdp" in names or "shard" in names

    def gather(self, value: Any) -> list[Any]:
        """Return the values that all ranks pass, in order of rank; they are pickled on the way."""
        if self.is_single:
            return [value]
        values: list[Any] = [None] * self.parallel.ranks
        dist.all_gather_object(values, value)
        return values

    def any(self, mine: bool) -> bool:
        """Return whether `mine` is true on any rank."""
        return any(self.gather(mine))

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if not self.is_single:
            dist.barrier()


SINGLE_RANK = Ranks()
"""The `Ranks` of a run with one rank."""


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, without a copy and outside autograd; any other tensor as it is."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor
