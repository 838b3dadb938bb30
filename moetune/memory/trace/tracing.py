"""The training step on fake tensors, every storage of it recorded.

The model comes from the same `build`, the step is the trainer's own, the optimizer too. What is injected is the one
value that shapes depend on: how many tokens each expert receives (`routing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from moetune.adapt.build import Adapted
from moetune.adapt.fake import build_fake, tensors_of
from moetune.compat.torch import QuickFakeMode
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.experts.bank import ExpertBank
from moetune.experts.context import CountReceived, CountRows, received_as_sent
from moetune.experts.host import stays_on_host
from moetune.memory.loading import load_peaks
from moetune.memory.report import LoadPeaks
from moetune.memory.routing import BALANCED, Replayed, Routing
from moetune.memory.trace.alike import Shortened, shorten
from moetune.memory.trace.log import Trace
from moetune.memory.trace.steps import STEPS, Steps, batches_of
from moetune.memory.trace.tracker import Tracker
from moetune.models.catalog.gpus import Gpu
from moetune.models.stack import decoder_layers
from moetune.parallel.fake_group import fake_ranks
from moetune.run.resolve import ResolvedRun, resolve


class NotTraceable(UserError):
    """The model's own code looks at values, which fake tensors do not have."""


def trace(
    run: ResolvedRun | RunConfig,
    routing: Routing | CountRows = BALANCED,
    *,
    shortened: bool = True,
    micro_steps: int | None = None,
    rank: int = 0,
    received: CountReceived = received_as_sent,
    gpu: Gpu | None = None,
) -> Trace:
    """Traces the first steps of a run, without weights, data or a GPU.

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
    whole = run if isinstance(run, ResolvedRun) else resolve(run)
    whole.refuse_unpredictable()
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
            tracker = Tracker(steps.named)
            if micro_steps is not None:
                traced = steps.run(tracker, micro_steps, steps=steps_to_take)
            else:  # over several ranks the first and the last send other things than those between
                most = 2 if adapted.ranks.is_single else 3
                traced = steps.run(tracker, min(most, config.train.accumulate), first=1, short=short)
        return replace(traced, load=peaks_of_loading(adapted, whole, short))


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
        capability = None if gpu is None else gpu.capability
        adapted = build_fake(run if short is None else short.run, mode, ranks, capability)
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


def peaks_of_loading(adapted: Adapted, whole: ResolvedRun, short: Shortened | None = None) -> LoadPeaks:
    """The peaks before the first step, from the storages of a model that is built.

    Args:
        whole: the run, all its layers included.
        short: what the layers of a shortened model stand for.
    """
    numbers = range(whole.structure.num_layers) if short is None else short.kept
    layers = dict(zip(numbers, decoder_layers(adapted.model).values(), strict=True))
    left_out = []
    for unit in () if short is None else short.units:
        for copy in unit.copies[1:]:
            layers |= {number: layers[run] for number, run in zip(copy, unit.layers, strict=True)}
            left_out += [layers[number] for number in copy]
    banks = {
        layer.index: _bytes(bank for bank in layers[layer.index].modules() if isinstance(bank, ExpertBank))
        for layer in whole.structure.moe_layers
    }
    static, on_host = (
        sum(_bytes([part], on_host=where) for part in (adapted.model, *left_out)) for where in (False, True)
    )
    return load_peaks(whole.structure, whole.config, whole.model.published, banks, static, on_host)


def _bytes(modules: Iterable[nn.Module], *, on_host: bool = False) -> int:
    """Of all storages that the modules have on the device, or on the host."""
    storages = [t.untyped_storage() for module in modules for t in tensors_of(module) if stays_on_host(t) == on_host]
    return sum({id(storage): storage.nbytes() for storage in storages}.values())
