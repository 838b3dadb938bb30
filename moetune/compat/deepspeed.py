"""DeepSpeed. Only `parallel/deepspeed.py` uses it, where the package is installed."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional


def keep_quiet(device: torch.device) -> None:
    """Tell DeepSpeed the device, so that it does not look for a GPU and print on standard output that there is none:
    accelerate imports the package in every run where it is installed."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)


@contextmanager
def without_others() -> Iterator[None]:
    """Assume, for a trace, that other ranks have the same weights in the same order, and that gradients are finite."""
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ))  # the engine writes its GPU there
        keep_quiet(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        from deepspeed.accelerator import real_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
        from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
        from deepspeed.runtime.zero import stage3, stage_1_and_2
        from deepspeed.utils.groups import _release_process_group_references

        instead = (
            (real_accelerator, "ds_accelerator", CPU_Accelerator()),  # where fake tensors are
            (functional, "linear", functional.linear),  # stage 3 puts its own there, and leaves it
            (coordinator, "assert_ints_same_as_other_ranks", _send_ints),
            (stage3, "assert_ints_same_as_other_ranks", _send_ints),
            (stage3, "is_invalid_grad_norm", lambda _: False),
            (stage_1_and_2, "is_invalid_grad_norm", lambda _: False),
        )
        for module, name, value in instead:
            stack.enter_context(patch.object(module, name, value))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # it looks at their alignment
        stack.callback(_release_process_group_references)  # it would take them for those of the next trace
        yield


def _send_ints(ints: list[int]) -> None:
    """Send what that check sends, the numbers and their count, without reading an answer."""
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator

    for count in (1, len(ints)):
        numbers = torch.zeros(count, dtype=torch.int64, device=get_accelerator().device_name(os.environ["LOCAL_RANK"]))
        comm.broadcast(numbers, src=0, async_op=False)


def initialize(model: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> Any:
    """Return DeepSpeed's engine over a model that is on its device; its log goes to stderr.

    DeepSpeed reads its GPU from the environment, now and at later steps; nothing else reads it any more.
    """
    device = next(model.parameters()).device
    keep_quiet(device)
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning, r"torch\.distributed")  # what it calls
    import deepspeed

    logger = logging.getLogger("DeepSpeed")
    logger.addFilter(lambda record: "untested optimizer" not in record.getMessage())  # torch's, but for Adam
    for handler in logger.handlers:
        if type(handler) is logging.StreamHandler:  # its own
            handler.setStream(sys.stderr)  # standard output is for what a command was asked for
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, to go past gloo
    with patch.object(model, "to", lambda *_: model):
        return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def prepare_backward(engine: Any) -> None:
    """Do what calling the engine instead of the model does before a backward pass."""
    engine.optimizer.clear_backward_seen_flag()
    engine._backward_prologue()


def norm_of_all(engine: Any, stage: int) -> Tensor:
    """Norm of all ranks' gradients, before clipping; ZeRO-3 has no public way."""
    from deepspeed.runtime.utils import combine_grad_norm_groups

    zero = engine.optimizer
    return combine_grad_norm_groups(zero._get_norm_groups()) if stage == 3 else zero.scaled_global_norm()


def link_states(engine: Any) -> None:
    """Link the states of ZeRO-1 and 2 to parameters. DeepSpeed does so once, after its first group's update, when the
    others have none yet."""
    engine.optimizer._hp_optimizer_states_linked = False
    engine.optimizer._lazy_init_hp_params_optimizer_state()
