"""Updates of parameters: direct, through a float32 copy, or with stochastic rounding.

Weights of 16 bits have 8 (bfloat16) or 11 (float16) significant bits, so a bfloat16 weight does not change by an update
below 2^-9 of it. `optimizer.master_weights` chooses what the optimizer updates:

    none        the weights themselves
    fp32        a float32 copy, kept between steps; the weights are that copy, rounded to nearest
    stochastic  a float32 copy made for the update and freed after it; the weights are that copy, rounded up or down
                with the probability that makes the result right on average

For float32 weights all three are the same.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from moetune.compat.bitsandbytes import page, update
from moetune.parallel.ranks import local_tensor
from moetune.training.optim.lomo import ScalingOptimizer

MasterWeights = Literal["none", "fp32", "stochastic"]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_BLOCK = 2**22  # weights that are rounded at a time, to limit temporary memory


class Updater:
    """An optimizer with the parameters that it updates.

    Args:
        parameters: parameters of the model, DTensors if they are sharded.
        make: makes the optimizer over a list of tensors: parameters, this rank's shards or float32 copies of them.
        masters: the setting `optimizer.master_weights`, for 16-bit weights.
        fused: whether each parameter is updated in the backward pass, when its gradient is complete (step/fused.py).

    Attributes:
        shards: parameter -> this rank's part of it, in the same storage.
        copies: parameter -> its float32 copy, for 16-bit weights with `masters`. With stochastic rounding a copy has no
            elements between updates.
        on_host: whether the update runs on the host.
    """

    on_host = False

    def __init__(
        self,
        parameters: list[nn.Parameter],
        make: MakeOptimizer,
        masters: MasterWeights = "none",
        fused: bool = False,
    ) -> None:
        self.parameters, self.fused, self.masters = parameters, fused, masters
        self.shards = {parameter: shard_of(parameter) for parameter in parameters}
        self.copies = {
            parameter: nn.Parameter(shard.detach().float()) if masters == "fp32" else _nothing(shard)
            for parameter, shard in self.shards.items()
            if masters != "none" and parameter.itemsize < 4
        }
        self.optimizer = make([self.copies.get(parameter, shard) for parameter, shard in self.shards.items()])

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        """Update the parameters that have a gradient, by `scale` times it; gradients may be scaled in place."""
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
        """Yield each parameter with the tensor that is updated for it: a float32 copy, or this rank's shard."""
        return ((parameter, self.copies.get(parameter, shard)) for parameter, shard in self.shards.items())

    def masters_kept(self) -> Iterator[Tensor]:
        """Yield the float32 copies of weights that are kept between steps."""
        return iter(self.copies.values()) if self.masters == "fp32" else iter(())

    def saved(self) -> Iterator[tuple[nn.Parameter, Tensor, dict[str, Any]]]:
        """Yield what a checkpoint holds, uncopied: each parameter, this rank's weights, and its states by name.

        With `master_weights: fp32` the float32 copy is the state `master`.
        """
        for parameter, updated in self.updates():
            states = dict(self.optimizer.state.get(updated, {}))
            if parameter in self.copies and self.masters == "fp32":
                states["master"] = updated.detach()
            yield parameter, self.shards[parameter].detach(), states

    @torch.no_grad()
    def restore(self, states: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Load the states of every parameter of this updater, as `saved` yields them; `master` into the float32 copy.

        The weights themselves are restored by `checkpoint.read_trained`.
        """
        for parameter, updated in self.updates():
            values = dict(states[parameter])
            if parameter in self.copies and self.masters == "fp32":
                updated.copy_(values.pop("master"))
            if values:  # not `load_state_dict`, which converts some states to the dtype of the weights
                on_device = {name: x.to(updated.device) if torch.is_tensor(x) else x for name, x in values.items()}
                self.optimizer.state[updated] = on_device
        if getattr(self.optimizer, "is_paged", False):
            page(self.optimizer)


def shard_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return what this rank updates of a parameter, in the same storage: the parameter itself, or for a DTensor a new
    parameter of its local shard."""
    part = local_tensor(parameter)
    return parameter if part is parameter else nn.Parameter(part.detach(), parameter.requires_grad)


def _nothing(parameter: nn.Parameter) -> nn.Parameter:
    """Return an empty float32 parameter, with as many dimensions as `parameter`: weight decay depends on them."""
    return nn.Parameter(parameter.detach().new_empty(0, *parameter.shape[1:], dtype=torch.float32))


@torch.no_grad()
def round_stochastically_(weight: Tensor, value: Tensor) -> None:
    """Round float32 `value` into bfloat16 or float16 `weight`, both contiguous; the expected result is `value`.

    A value is rounded to one of its two neighbours. The probability of the one farther from zero is the distance from
    the other, over the gap between them. A bfloat16 is the upper half of a float32: adding 16 random bits to the lower
    half carries into the upper half with just this probability, and the lower half is then cut off. Of a float16, in
    its normal range, 13 bits are cut off.
    """
    dropped = {torch.bfloat16: 16, torch.float16: 13}[weight.dtype]
    flat, exact = weight.view(-1), value.view(-1)
    for start in range(0, flat.numel(), _BLOCK):
        bits = exact[start : start + _BLOCK].view(torch.int32)
        noise = torch.randint(2**dropped, bits.shape, dtype=torch.int32, device=bits.device)
        rounded = noise.add_(bits).bitwise_and_(-(2**dropped)).view(torch.float32)
        flat[start : start + _BLOCK] = rounded
