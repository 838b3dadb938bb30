"""DeepSpeed's engine under a run's own steps: ZeRO-1, 2, 3 and ZeRO-Offload. Only this file and `compat/deepspeed.py`,
which has its private interfaces, import deepspeed.

DeepSpeed averages gradients over ranks. Here a rank's loss is its share of the step's, so gradients have to be summed:
the loss is multiplied by the number of ranks before backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moetune.compat import deepspeed as patches
from moetune.errors import UserError
from moetune.experts.bank import ExpertBank


def is_installed() -> bool:
    """Whether the package is installed."""
    return find_spec("deepspeed") is not None


def require_deepspeed() -> None:
    """Raise `UserError` if the package is not installed."""
    if not is_installed():
        raise UserError(
            "parallel.engine: deepspeed needs a package that is not installed: DS_BUILD_OPS=0 pip install "
            "--no-build-isolation deepspeed"
        )


@contextmanager
def without_others() -> Iterator[None]:
    """Let this rank run without the others, for a trace.

    Raises:
        UserError: the package is not installed.
    """
    require_deepspeed()
    with patches.without_others():
        yield


class Engine:
    """Train what requires a gradient in a model, on all ranks of torch.distributed.

    Args:
        optimizer: of torch, over parameters of one dtype. DeepSpeed replaces them by its own flat tensors.
        settings: `deepspeed_json`.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> None:
        require_deepspeed()
        from deepspeed.utils import set_z3_leaf_modules

        if settings["zero_optimization"]["stage"] == 3 and any(isinstance(m, ExpertBank) for m in model.modules()):
            set_z3_leaf_modules(model, [ExpertBank])  # it reads its experts' weights, their modules do not run
        self.engine = patches.initialize(model, optimizer, settings)
        self.optimizer, self.stage = optimizer, settings["zero_optimization"]["stage"]
        self.ranks = torch.distributed.get_world_size()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Run backward of one micro-batch; after the `last` of a step reduce the ranks' gradients."""
        self.engine.set_gradient_accumulation_boundary(last)
        patches.prepare_backward(self.engine)
        # a loss that is not finite makes all gradients so, and DeepSpeed skips such a step
        self.engine.backward(loss * (self.ranks + 0 * loss.detach()), scale_wrt_gas=False)

    def norm(self) -> Tensor:
        """Norm of all ranks' gradients, before clipping; infinite if one of them is not finite."""
        return patches.norm_of_all(self.engine, self.stage)

    def step(self) -> None:
        """Clip and update."""
        self.engine.step()

    def forget(self) -> None:
        """Drop the gradients of a step of which one is not finite."""
        self.engine.step()
        assert not self.engine.was_step_applied()

    def gathered(self, parameter: nn.Parameter) -> AbstractContextManager[Any]:
        """Hold a parameter whole on every rank."""
        from deepspeed.runtime.zero import GatheredParameters

        return GatheredParameters([parameter])

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """A parameter's whole gradient, between `backward` and `step`; called on every rank."""
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter)

    def weights(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter and this rank's part of it."""
        for parameter in self.engine.module.parameters():
            yield parameter, parameter.ds_tensor if self.stage == 3 else parameter

    def gradients(self) -> Iterator[Tensor]:
        """The gradients that are kept from one micro-step to the next."""
        zero = self.engine.optimizer
        if self.stage == 3:
            yield zero.grad_partitions_flat_buffer
            return
        for of_groups in (zero.averaged_gradients, zero.all_grad_tensors):
            for gradients in of_groups.values():
                yield from gradients or ()

    @property
    def masters(self) -> list[Tensor]:
        """This rank's part of the float32 weights, flat."""
        zero = self.engine.optimizer
        return zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups

    def states(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The optimizer's whole states of a parameter, called on every rank; a 16-bit one has its float32 copy as
        `master`."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        states = {"master": safe_get_full_fp32_param(parameter)} if parameter.itemsize < 4 else {}
        for key, value in self.optimizer.state.get(self.masters[0], {}).items():
            states[key] = safe_get_full_optimizer_state(parameter, key) if value.dim() else value
        return states

    def link_states(self) -> None:
        """Prepare for `states`."""
        if self.stage < 3:
            patches.link_states(self.engine)

    def put(self, parameter: nn.Parameter, states: dict[str, Tensor]) -> None:
        """Restore what `states` returned."""
        if not states:
            return
        for flat in self.masters:
            there = self.optimizer.state[flat]
            missing = states.keys() - there.keys() - {"master"}
            for key in missing:
                there[key] = torch.zeros_like(flat) if states[key].dim() else states[key].to(flat.device, copy=True)
        if missing:  # in every group alike
            self.link_states()
        for key, value in states.items():
            if value.dim():
                self._put(parameter, value, None if key == "master" else key)

    def _put(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        from deepspeed import utils

        if self.stage < 3:
            put_weight, put_state = utils.safe_set_full_fp32_param, utils.safe_set_full_optimizer_state
        else:  # DeepSpeed pads its parts of a tensor that ranks do not divide, but not a value that is set
            put_weight, put_state = utils.safe_set_local_fp32_param, utils.safe_set_local_optimizer_state
            shard: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
            size, rank = shard.numel(), torch.distributed.get_rank()
            filled = functional.pad(value.flatten(), (0, self.ranks * size - value.numel()))
            value = filled[rank * size : (rank + 1) * size]
        if key is None:
            put_weight(parameter, value)
        else:
            put_state(parameter, value, key)
