"""One optimizer and the weights that it updates, of whatever precision.

Weights of 16 bits have 8 (bfloat16) or 11 significant bits: an update below 2^-9 of a weight rounds to nothing. Three
ways (`optimizer.master_weights`):

    none        the optimizer works on the weights themselves
    fp32        on a float32 copy, which is kept; the weights are that copy rounded
    stochastic  on a float32 copy made for the update and dropped after it; the weights are that copy rounded up or down
                with the probability that makes the rounded value right on average

Where a weight is float32 already the three are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moetune.compat.bitsandbytes import load_paged, update
from moetune.parallel.ranks import local_tensor
from moetune.training.optim.lomo import ScalingOptimizer

MasterWeights = Literal["none", "fp32", "stochastic"]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_BLOCK = 2**22  # weights that are rounded at a time


class Updater:
    """An optimizer over some parameters.

    Args:
        key: names it in a checkpoint.
        parameters: what trains.
        make: gives the optimizer over what it will update: parameters, or float32 copies of them.
        fused: whether it runs as each gradient comes (training/step/fused.py), not when all have come.
    """

    on_host = False

    def __init__(
        self,
        key: str,
        parameters: list[nn.Parameter],
        make: MakeOptimizer,
        masters: MasterWeights = "none",
        fused: bool = False,
    ) -> None:
        self.key, self.parameters, self.fused, self.masters = key, parameters, fused, masters
        self.shards = {parameter: shard_of(parameter) for parameter in parameters}
        self.copies = {
            parameter: nn.Parameter(shard.detach().float()) if masters == "fp32" else _nothing(shard)
            for parameter, shard in self.shards.items()
            if masters != "none" and parameter.itemsize < 4
        }
        self.optimizer = make([self.copies.get(parameter, shard) for parameter, shard in self.shards.items()])

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        """One update with gradients times `scale`; parameters without a gradient stay as they are."""
        scaling = self.optimizer if isinstance(self.optimizer, ScalingOptimizer) else None
        for parameter, shard in self.shards.items():
            if parameter.grad is None or not shard.numel():
                continue
            gradient = local_tensor(parameter.grad)
            copy = self.copies.get(parameter)
            if copy is None:
                if scale != 1.0 and scaling is None:
                    gradient.mul_(scale)
                shard.grad = gradient
                continue
            if self.masters == "stochastic":
                copy.data = shard.float()
            copy.grad = gradient.float().mul_(scale)
        if scaling is not None:
            scaling.step(scale=1.0 if self.copies else scale)
        else:
            update(self.optimizer)
        for parameter, shard in self.shards.items():
            if shard is not parameter:
                shard.grad = None
        for parameter, copy in self.copies.items():
            if copy.grad is None:
                continue
            copy.grad = None
            shard = self.shards[parameter]
            if self.masters == "fp32":
                shard.copy_(copy)
            else:
                round_stochastically_(shard, copy)
                copy.data = _nothing(shard).data

    def updates(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Each parameter, and what the optimizer updates of it: a float32 copy, or this rank's part."""
        return ((parameter, self.copies.get(parameter, shard)) for parameter, shard in self.shards.items())

    def saved(self) -> Iterator[tuple[nn.Parameter, Tensor, dict[str, Any]]]:
        """What a checkpoint has of each parameter here: its values; its states and, of a float32 copy, `master`."""
        for parameter, shard in self.shards.items():
            states = dict(self.optimizer.state.get(self.copies.get(parameter, shard), {}))
            if parameter in self.copies and self.masters == "fp32":
                states["master"] = self.copies[parameter].detach()
            yield parameter, shard.detach(), states

    def masters_kept(self) -> Iterator[Tensor]:
        """The float32 copies that stay from step to step."""
        return iter(self.copies.values()) if self.masters == "fp32" else iter(())

    def state_dict(self) -> dict[str, Any]:
        kept = [copy.detach() for copy in self.masters_kept()]
        return {"optimizer": self.optimizer.state_dict(), "masters": kept}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if getattr(self.optimizer, "is_paged", False):
            load_paged(self.optimizer, state["optimizer"])
        else:
            self.optimizer.load_state_dict(state["optimizer"])
        for copy, saved in zip(self.masters_kept(), state["masters"], strict=True):
            copy.copy_(saved)


def shard_of(parameter: nn.Parameter) -> nn.Parameter:
    """What this rank updates of a parameter: all of it, or its own part as a parameter of the same storage."""
    part = local_tensor(parameter)
    return parameter if part is parameter else nn.Parameter(part.detach(), parameter.requires_grad)


def _nothing(parameter: nn.Parameter) -> nn.Parameter:
    """No elements, but as many dimensions, by which weight decay goes."""
    return nn.Parameter(parameter.detach().new_empty(0, *parameter.shape[1:], dtype=torch.float32))


@torch.no_grad()
def round_stochastically_(weight: Tensor, value: Tensor) -> None:
    """Rounds float32 `value` into 16-bit `weight`, up with a probability equal to the share of the gap that is passed.

    A bfloat16 is the upper half of a float32: adding 16 random bits to the lower half and cutting it off carries into
    the upper with just that probability. float16 has 13 bits less than float32 in its normal range.
    """
    dropped = {torch.bfloat16: 16, torch.float16: 13}[weight.dtype]
    flat, exact = weight.view(-1), value.view(-1)
    for start in range(0, flat.numel(), _BLOCK):
        bits = exact[start : start + _BLOCK].view(torch.int32)
        noise = torch.randint(2**dropped, bits.shape, dtype=torch.int32, device=bits.device)
        rounded = noise.add_(bits).bitwise_and_(-(2**dropped)).view(torch.float32)
        flat[start : start + _BLOCK] = rounded
