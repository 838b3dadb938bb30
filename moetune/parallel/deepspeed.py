"""The DeepSpeed engine (ZeRO-1, 2, 3, ZeRO-Offload), driven by moetune's own steps.

Only this file and compat/deepspeed.py, which has its private interfaces, import deepspeed. DeepSpeed averages gradients
over ranks. Here each rank's loss is its share of the step's loss, so gradients must be summed; the loss is therefore
multiplied by the number of ranks before backward.
"""

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


def require_deepspeed() -> None:
    """Raise `UserError` if the deepspeed package is not installed."""
    if find_spec("deepspeed") is None:
        raise UserError(
            "parallel.engine: deepspeed needs a package that is not installed: DS_BUILD_OPS=0 pip install "
            "--no-build-isolation deepspeed"
        )


@contextmanager
def without_others() -> Iterator[None]:
    """Let DeepSpeed run on this rank alone within the `with` block, for a trace.

    Raises `UserError` if it is not installed.
    """
    require_deepspeed()
    with patches.without_others():
        yield


class Engine:
    """Trains a model's parameters that require a gradient with DeepSpeed, on all ranks of torch.distributed.

    In each step, call `backward` for every micro-batch, then `norm`, and then `step` if it is finite, else `forget`.

    Args:
        model: on its device.
        optimizer: a torch optimizer over parameters of one dtype. DeepSpeed replaces its parameters by flat tensors.
        settings: DeepSpeed's configuration, as `deepspeed_json` returns it.

    Attributes:
        engine: DeepSpeed's engine.
        stage: ZeRO stage, 1 to 3.
        ranks: number of ranks.

    Raises:
        UserError: the deepspeed package is not installed.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> None:
        require_deepspeed()
        from deepspeed.utils import set_z3_leaf_modules

        if settings["zero_optimization"]["stage"] == 3 and any(isinstance(m, ExpertBank) for m in model.modules()):
            set_z3_leaf_modules(model, [ExpertBank])  # a bank reads its experts' weights without calling their modules
        self.engine = patches.initialize(model, optimizer, settings)
        self.optimizer, self.stage = optimizer, settings["zero_optimization"]["stage"]
        self.ranks = torch.distributed.get_world_size()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Run backward of one micro-batch, given this rank's share of the step's loss.

        Gradients are reduced over ranks after the `last` micro-batch of a step.
        """
        self.engine.set_gradient_accumulation_boundary(last)
        patches.prepare_backward(self.engine)
        # 0 * loss makes all gradients NaN if the loss is not finite, so that DeepSpeed skips the step
        self.engine.backward(loss * (self.ranks + 0 * loss.detach()), scale_wrt_gas=False)

    def norm(self) -> Tensor:
        """Return the L2 norm of all ranks' gradients before clipping, a scalar tensor; inf if one is not finite."""
        return patches.norm_of_all(self.engine, self.stage)

    def step(self) -> None:
        """Clip the gradients and update the weights."""
        self.engine.step()

    def forget(self) -> None:
        """Drop the gradients of a step if they are not all finite.

        Raises `AssertionError` if they are, because DeepSpeed has then updated the weights.
        """
        self.engine.step()
        assert not self.engine.was_step_applied()

    def gathered(self, parameter: nn.Parameter) -> AbstractContextManager[Any]:
        """Return a context within which the parameter is whole on every rank; all ranks must enter it."""
        from deepspeed.runtime.zero import GatheredParameters

        return GatheredParameters([parameter])

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return a parameter's whole gradient, between `backward` and `step`; all ranks must call it."""
        from deepspeed.utils import safe_get_full_grad

        return safe_get_full_grad(parameter)

    def weights(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield (parameter, what this rank stores of it): a flat shard under ZeRO-3, else the parameter itself."""
        for parameter in self.engine.module.parameters():
            yield parameter, parameter.ds_tensor if self.stage == 3 else parameter

    def gradients(self) -> Iterator[Tensor]:
        """Yield the gradient tensors that DeepSpeed keeps from one micro-step to the next."""
        zero = self.engine.optimizer
        if self.stage == 3:
            yield zero.grad_partitions_flat_buffer
            return
        for of_groups in (zero.averaged_gradients, zero.all_grad_tensors):
            for gradients in of_groups.values():
                yield from gradients or ()

    @property
    def masters(self) -> list[Tensor]:
        """This rank's parts of the float32 weights, as flat tensors of several parameters each."""
        zero = self.engine.optimizer
        return zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups

    def states(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the whole optimizer states of a parameter by name; all ranks must call it.

        A 16-bit parameter has its float32 copy under the key "master". Under ZeRO-1 and 2, call `link_states` first.
        """
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        states = {"master": safe_get_full_fp32_param(parameter)} if parameter.itemsize < 4 else {}
        for key, value in self.optimizer.state.get(self.masters[0], {}).items():
            states[key] = safe_get_full_optimizer_state(parameter, key) if value.dim() else value
        return states

    def link_states(self) -> None:
        """Link optimizer states to parameters under ZeRO-1 and 2, as `states` needs; do nothing under ZeRO-3."""
        if self.stage < 3:
            patches.link_states(self.engine)

    def put(self, parameter: nn.Parameter, states: dict[str, Tensor]) -> None:
        """Restore the optimizer states of a parameter, and its float32 copy, from what `states` returned.

        Does nothing if that is empty.
        """
        if not states:
            return
        for flat in self.masters:
            of_group = self.optimizer.state[flat]
            missing = states.keys() - of_group.keys() - {"master"}
            for key in missing:
                of_group[key] = torch.zeros_like(flat) if states[key].dim() else states[key].to(flat.device, copy=True)
        if missing:  # the same states in every group
            self.link_states()
        for key, value in states.items():
            if value.dim():
                self._put(parameter, value, None if key == "master" else key)

    def _put(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        """Set the optimizer state `key` of a parameter to the whole tensor `value`; None for the float32 copy."""
        from deepspeed import utils

        if self.stage < 3:
            put_weight, put_state = utils.safe_set_full_fp32_param, utils.safe_set_full_optimizer_state
        else:  # DeepSpeed pads a parameter to a multiple of the ranks, but not a value to set
            put_weight, put_state = utils.safe_set_local_fp32_param, utils.safe_set_local_optimizer_state
            shard: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
            size, rank = shard.numel(), torch.distributed.get_rank()
            filled = functional.pad(value.flatten(), (0, self.ranks * size - value.numel()))
            value = filled[rank * size : (rank + 1) * size]
        if key is None:
            put_weight(parameter, value)
        else:
            put_state(parameter, value, key)
