"""The training step on fake tensors, every storage of it recorded.

The model comes from the same `build`, the step is the trainer's own, the optimizer too. What is injected is the one
value that shapes depend on: how many tokens each expert receives (`routing`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from moetune.adapt.build import Adapted
from moetune.adapt.fake import build_fake
from moetune.compat.torch import QuickFakeMode
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.experts.context import CountReceived, CountRows, received_as_sent
from moetune.memory.routing import BALANCED, Replayed, Routing
from moetune.memory.trace.alike import Shortened, shorten
from moetune.memory.trace.loading import load_peaks
from moetune.memory.trace.steps import STEPS, Steps, batches_of
from moetune.memory.trace.views import Trace
from moetune.models.catalog.gpus import Gpu
from moetune.parallel.join import fake_ranks
from moetune.run.resolve import AnyRun, ResolvedRun, resolve
from moetune.run.validation import refuse_unpredictable


class NotTraceable(UserError):
    """The model's own code looks at values, which fake tensors do not have."""


def trace(
    run: AnyRun,
    routing: Routing | CountRows = BALANCED,
    *,
    shortened: bool = True,
    micro_steps: int | None = None,
    rank: int = 0,
    received: CountReceived = received_as_sent,
    gpu: Gpu | None = None,
) -> Trace:
    """Trace the first steps of a run, without weights, data or a GPU.

    Args:
        routing: what the experts receive: an assumption, or whatever answers in place of `ExpertHooks.count_rows`.
        shortened: run a few of the layers that are alike instead of each (docs/concepts/trace.md): the same result,
            sooner. Runs with a load that differs from layer to layer are traced in full.
        micro_steps: of each step; by default two at most, because all further ones are like the second.
        rank: which one of `parallel:` it is.
        received: what its experts receive from other ranks; by default as if these sent what it sends.
        gpu: the card whose kernels run; None for the CPU's.

    Raises:
        UserError: as `resolve`; or the run file asks for what training does not do yet.
        NotTraceable: the model's own code looks at values.
    """
    whole = resolve(run, "cuda")
    refuse_unpredictable(whole.config)
    config = whole.config
    steps_to_take = STEPS
    if isinstance(routing, Replayed):  # the same steps, or its answers would be those to other questions
        steps_to_take, micro_steps, routing = routing.steps, config.train.accumulate, routing.answers()
    is_even = micro_steps is None and isinstance(routing, Routing) and not routing.load
    with faked(whole, rank, gpu, shortened=shortened and is_even, received=received) as (adapted, short, mode):
        adapted.model.train()
        makes_its_own = config.parallel.engine == "deepspeed"  # tensors; torch's and bitsandbytes' optimizers read some
        with mode if makes_its_own else nullcontext():
            steps = Steps(adapted, batches_of(adapted), None if short is None else short.kept, gpu)
        with mode, steps.counting(routing):
            tracker = steps.tracker(counts=True)
            if micro_steps is not None:
                traced = steps.run(tracker, micro_steps, steps=steps_to_take)
            else:  # over several ranks the first and the last send other things than those between
                most = 2 if adapted.ranks.is_single else 3
                traced = steps.run(tracker, min(most, config.train.accumulate), first=1, short=short)
        return replace(traced, load=load_peaks(whole, traced))


@contextmanager
def faked(
    run: ResolvedRun, rank: int, gpu: Gpu | None, *, shortened: bool, received: CountReceived = received_as_sent
) -> Iterator[tuple[Adapted, Shortened | None, QuickFakeMode]]:
    """The model of a run on fake tensors, what its layers stand for, and the mode that it computes in.

    Args:
        shortened: leave layers out that others can stand for, where that can be.

    Raises:
        NotTraceable: what is done inside looks at values.
    """
    mode = QuickFakeMode()
    with fake_ranks(run.config.parallel, rank) as ranks:
        short = shorten(run, ranks) if shortened and can_be_shortened(run.config) else None
        adapted = build_fake(run if short is None else short.run, mode, ranks, None if gpu is None else gpu.capability)
        try:
            with adapted.expert_context.hooks.using(count_received=received):
                yield adapted, short, mode
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise NotTraceable(
                f"{run.config.model.path!r} cannot be traced: the code of model type "
                f"{run.structure.model_type!r} looks at values ({error.func})"
            ) from None


def can_be_shortened(config: RunConfig) -> bool:
    """Whether what happens outside of layers does not grow with their number, but for what belongs to one.

    DeepSpeed lays all that trains end to end in one tensor; router losses are computed of all layers' logits.
    """
    return not (config.parallel.engine == "deepspeed" or config.train.router_aux_loss or config.train.router_z_loss)
