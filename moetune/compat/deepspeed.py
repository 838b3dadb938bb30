"""DeepSpeed: start without output, trace on one rank, private parts of its optimizers.

Only parallel/deepspeed.py and training/run.py use this file.
"""

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
    """Set DeepSpeed's device in the environment, unless it is set, so that it prints nothing when imported.

    Without it, DeepSpeed looks for a GPU and prints on stdout if there is none. accelerate imports the package in every
    run where it is installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)


@contextmanager
def without_others() -> Iterator[None]:
    """Let DeepSpeed's ZeRO run on this rank alone within the `with` block, for a trace on fake CPU tensors.

    Other ranks are assumed to have the same weights in the same order, and gradients to be finite.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ))  # the engine writes `LOCAL_RANK` there
        keep_quiet(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        from deepspeed.accelerator import real_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
        from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
        from deepspeed.runtime.zero import stage3, stage_1_and_2
        from deepspeed.utils.groups import _release_process_group_references

        instead = (
            (real_accelerator, "ds_accelerator", CPU_Accelerator()),  # fake tensors are on the CPU
            (functional, "linear", functional.linear),  # ZeRO-3 replaces it and does not restore it
            (coordinator, "assert_ints_same_as_other_ranks", _send_ints),
            (stage3, "assert_ints_same_as_other_ranks", _send_ints),
            (stage3, "is_invalid_grad_norm", lambda _: False),
            (stage_1_and_2, "is_invalid_grad_norm", lambda _: False),
        )
        for module, name, value in instead:
            stack.enter_context(patch.object(module, name, value))
        stack.enter_context(warnings.catch_warnings())
        # DeepSpeed checks the alignment of tensors
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        stack.callback(_release_process_group_references)  # otherwise the next trace would use these groups
        yield


def _send_ints(ints: list[int]) -> None:
    """Communicate as DeepSpeed's `assert_ints_same_as_other_ranks`, but compare nothing: the tensors are fake.

    It broadcasts from rank 0 the number of integers, and then the integers.
    """
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator

    for count in (1, len(ints)):
        numbers = torch.zeros(count, dtype=torch.int64, device=get_accelerator().device_name(os.environ["LOCAL_RANK"]))
        comm.broadcast(numbers, src=0, async_op=False)


def initialize(model: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> Any:
    """Return DeepSpeed's engine for a model on its device and a torch optimizer, with DeepSpeed's log on stderr.

    `settings` is DeepSpeed's configuration. Sets `LOCAL_RANK` in the environment, from which DeepSpeed reads its GPU
    now and at later steps.
    """
    device = next(model.parameters()).device
    keep_quiet(device)
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    # DeepSpeed calls deprecated functions
    warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning, r"torch\.distributed")
    import deepspeed

    logger = logging.getLogger("DeepSpeed")
    logger.addFilter(lambda record: "untested optimizer" not in record.getMessage())  # any of torch's but Adam
    for handler in logger.handlers:
        if type(handler) is logging.StreamHandler:  # DeepSpeed's own handler
            handler.setStream(sys.stderr)  # stdout is for the command's result
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, to replace Gloo
    with patch.object(model, "to", lambda *_: model):
        return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def prepare_backward(engine: Any) -> None:
    """Prepare DeepSpeed's engine for a backward pass that follows a forward pass of the model itself.

    A forward pass through the engine would reset the engine's record of seen gradients and register its hooks; a run's
    steps call the model, so they call this function before each backward pass.
    """
    engine.optimizer.clear_backward_seen_flag()
    engine._backward_prologue()


def norm_of_all(engine: Any, stage: int) -> Tensor:
    """Return the L2 norm of all ranks' gradients before clipping, for ZeRO stage `stage`.

    DeepSpeed has no public function for it under ZeRO-3.
    """
    from deepspeed.runtime.utils import combine_grad_norm_groups

    zero = engine.optimizer
    return combine_grad_norm_groups(zero._get_norm_groups()) if stage == 3 else zero.scaled_global_norm()


def link_states(engine: Any) -> None:
    """Link optimizer states to their parameters under ZeRO-1 and 2, for all parameter groups, so that they can be read.

    DeepSpeed does so only once, after the update of its first group, when the other groups have no states yet.
    """
    engine.optimizer._hp_optimizer_states_linked = False
    engine.optimizer._lazy_init_hp_params_optimizer_state()
