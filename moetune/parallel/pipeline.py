"""Runs the stages of a pipeline by torch's schedules (torch.distributed.pipelining).

Each stage is told the shapes of what it receives and sends: without them torch would run forward and backward once
more, on uninitialized memory, to infer them. Losses are sums over the whole step, so torch must not scale gradients.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from moetune.compat.torch import shapes_are_given
from moetune.errors import UserError
from moetune.parallel.ranks import Ranks

Forward = Callable[[int, int, tuple[Tensor, ...]], Tensor | tuple[Tensor, ...]]
"""(number of this rank's stage, number of the micro-batch, what the stage before sent) -> what is sent to the next; of
the last stage a scalar loss."""


class _Module(nn.Module):
    """The stage number `stage` of this rank, which counts its calls: each stage takes the micro-batches in order."""

    def __init__(self, stage: int, forward: Forward) -> None:
        super().__init__()
        numbers = count()
        self.forward = lambda *received: forward(stage, next(numbers), received)


class _Stage(PipelineStage):
    """A stage of torch's whose backward passes run within the context manager `around`."""

    around: Callable[[], AbstractContextManager[None]] = nullcontext

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self.around():
            super().backward_one_chunk(*args, **kwargs)

    def _output_slot_is_releasable(self, output: Tensor) -> tuple[bool, str]:
        """Tell torch 2.15 to free what was sent, in a trace too: it keeps subclasses of tensors, such as fake ones."""
        return not self.is_last, "the loss"


def run_stages(
    ranks: Ranks,
    forward: Forward,
    micro_batches: int,
    sent: tuple[Tensor, ...],
    trains_before: tuple[bool, ...],
    device: torch.device,
    around: Callable[[], AbstractContextManager[None]] | None,
) -> None:
    """Run all stages of this rank on the micro-batches of a step; every rank of the pipeline must call this.

    Args:
        micro_batches: their number, the same on every rank.
        sent: tensors on the meta device with shape and dtype of what a stage sends to the next; the same for all.
        trains_before: for each stage, whether anything trains in an earlier one, so that it needs a gradient.
        around: makes the context manager in which each backward pass runs; None to run forward passes only.

    Raises:
        UserError: an error of that kind in a stage.
    """
    assert ranks.dense is not None
    group, pp, trains = ranks.dense.get_group("pp"), ranks.parallel.pp, around is not None
    numbers, stages = range(len(trains_before)), list[_Stage]()

    def between(number: int) -> tuple[Tensor, ...]:
        """Return what enters a stage, and requires a gradient if anything before it trains."""
        return tuple(torch.empty_like(tensor, requires_grad=trains_before[number]) for tensor in sent)

    for local, number in enumerate(numbers[ranks.coordinates.pp :: pp]):
        received = between(number) if number else ()
        leaves = between(number + 1) if number < numbers[-1] else torch.empty((), device="meta")
        module = _Module(local, forward)
        stages.append(_Stage(module, number, len(numbers), device, received, leaves, group=group))
        stages[-1].around = around or nullcontext
    kind: Any = get_schedule_class(ranks.parallel.schedule)
    loss_fn = (lambda output, target: output) if trains else None
    schedule = kind(stages if len(stages) > 1 else stages[0], micro_batches, loss_fn=loss_fn, scale_grads=False)
    try:
        with shapes_are_given():
            if trains:
                schedule.step(target=torch.zeros(micro_batches, device=device), return_outputs=False)
            else:
                schedule.eval(return_outputs=False)
    except RuntimeError as error:  # torch wraps what a stage raises
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, UserError | torch.OutOfMemoryError):
            cause = cause.__cause__
        raise cause or error from None
