"""Runs the stages of a pipeline by torch's schedules (torch.distributed.pipelining).

Each stage is told the shapes of what it receives and sends: without them torch would run forward and backward once
more, on uninitialized memory, to infer them. Losses are sums over the whole step, so torch must not scale gradients.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from moetune.compat.torch import shapes_are_given
from moetune.errors import UserError
from moetune.parallel.ranks import Ranks

Forward = Callable[[int, int, tuple[Tensor, ...]], Tensor | tuple[Tensor, ...]]
"""(number of this rank's stage, number of the micro-batch, what the stage before sent) -> what is sent to the next; of
the last stage a scalar loss."""

_SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved1f1b": ScheduleInterleaved1F1B,
}


class _Module(nn.Module):
    """The stage number `stage` of this rank, which counts its calls: each stage takes the micro-batches in order."""

    def __init__(self, stage: int, forward: Forward) -> None:
        super().__init__()
        self._stage, self._forward, self._number = stage, forward, 0

    def forward(self, *received: Tensor) -> Tensor | tuple[Tensor, ...]:
        self._number += 1
        return self._forward(self._stage, self._number - 1, received)


class _Stage(PipelineStage):
    """A stage of torch's whose backward passes run within the context manager `around`."""

    around: Callable[[], AbstractContextManager[None]] = nullcontext

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self.around():
            super().backward_one_chunk(*args, **kwargs)


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
    group, count, pp = ranks.dense.get_group("pp"), len(trains_before), ranks.parallel.pp
    loss = torch.empty((), device="meta")
    stages = []

    def between(number: int) -> tuple[Tensor, ...]:
        """Return what enters a stage, and requires a gradient if anything before it trains."""
        return tuple(torch.empty_like(tensor, requires_grad=trains_before[number]) for tensor in sent)

    for local, number in enumerate(range(ranks.coordinates.pp, count, pp)):
        received = between(number) if number else ()
        leaves = loss if number == count - 1 else between(number + 1)
        stage = _Stage(
            _Module(local, forward), number, count, device, input_args=received, output_args=leaves, group=group
        )
        if around is not None:
            stage.around = around
        stages.append(stage)
    kind = _SCHEDULES[ranks.parallel.schedule]
    is_multiple = kind is ScheduleInterleaved1F1B
    trains = around is not None
    schedule = kind(
        stages if is_multiple else stages[0],
        micro_batches,
        loss_fn=(lambda output, target: output) if trains else None,
        scale_grads=False,
    )
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
