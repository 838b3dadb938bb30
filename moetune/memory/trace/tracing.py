"""`trace`: a run's first steps on fake tensors, without weights, data or GPU.

The model comes from the same `build` as in training, and step and optimizer are the trainer's own code. Only the number
of tokens that each expert receives is assumed (`routing`), because shapes depend on it and fake tensors have no values.

The fake tensors are on the device `cpu` even if a prediction is for a GPU, because a CPU-only torch cannot
differentiate fake CUDA tensors. The tracker and the predictor account for what differs on a GPU.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from moetune.adapt.attention import Capability
from moetune.adapt.build import Adapted, build
from moetune.compat.bitsandbytes import Linear4bit
from moetune.compat.fake_mode import QuickFakeMode, add_missing_fakes
from moetune.compat.torch import HostModule
from moetune.compat.transformers import fix_rotary_length, without_packages
from moetune.errors import UserError
from moetune.experts.context import CountReceived, CountRows, received_as_sent
from moetune.experts.host import mark_on_host
from moetune.formats.nf4 import Nf4
from moetune.kernels.registry import using_kernels
from moetune.memory.assumed_routing import BALANCED, AssumedRouting, Replayed
from moetune.memory.trace.alike import Shortened, Stack, shorten
from moetune.memory.trace.loading import load_peaks
from moetune.memory.trace.steps import STEPS, Steps, batches_of
from moetune.memory.trace.views import Trace
from moetune.models.catalog.gpus import Gpu
from moetune.models.stack import every_layer
from moetune.parallel.coordinates import Coordinates
from moetune.parallel.distribute import distribute, micro_steps_are_alike
from moetune.parallel.join import fake_ranks
from moetune.parallel.ranks import Ranks
from moetune.run.resolve import AnyRun, ResolvedRun, resolve
from moetune.run.validation import refuse_unpredictable

_FULL_ROWS = ("glm5_next", "glm5_next_text")
"""Model types whose indexer leaves out groups of keys without a token; a traced row is full."""


class NotTraceable(UserError):
    """Raised when the model's code reads the values of tensors, which fake tensors do not have."""


def trace(
    run: AnyRun,
    routing: AssumedRouting | CountRows = BALANCED,
    *,
    shortened: bool = True,
    simulated: bool = True,
    timed: bool = True,
    micro_steps: int | None = None,
    rank: int = 0,
    received: CountReceived = received_as_sent,
    gpu: Gpu | None = None,
) -> Trace:
    """Trace the first two steps of a run on fake tensors, without weights, data or a GPU.

    With `Replayed` routing, which holds the counts of recorded steps, all recorded steps and micro-steps are traced.

    Args:
        run: the path of a run file, a configuration, or a resolved run.
        routing: number of tokens that each expert receives: an assumption, or a function that replaces
            `ExpertHooks.count_rows`.
        shortened: run only a few of the layers that are alike and repeat their part of the log for the others
            (docs/concepts/trace.md), which is faster and has the same result. Ignored where `micro_steps` is given, and
            where the routing is a function or differs from layer to layer.
        simulated: whether the allocator will be simulated. Else the trace is condensed (`Tracker`): its peaks are the
            same.
        timed: whether work is counted. If it is not, and the allocator is not simulated, optimizer states, and the
            gradients to which later micro-steps add, are created without a micro-step; the peak of the second step is
            the same. Its work is then counted only on several ranks, with one addition of gradients too many.
        micro_steps: micro-steps of each step. By default 1 in the first step, and in the second at most 2, or 3 if the
            first, the last and those between communicate differently (`micro_steps_are_alike`), because all further
            micro-steps repeat; only the second step's peak then counts.
        rank: number of the traced rank, from 0.
        received: replaces `ExpertHooks.count_received`, the number of tokens that this rank's experts receive from each
            rank; by default every rank is assumed to send what this rank sends.
        gpu: GPU whose attention kernels and workspaces are assumed, and whose work is counted if its speed is known;
            None for a CPU's, without a count of work.

    Returns:
        The trace of one rank, with the peaks of loading the weights in `load`.

    Raises:
        UserError: the run file or model cannot be read or is invalid; the run has settings that cannot be predicted; a
            recorded load in `routing` does not match the model's layers or experts; the last step calls a collective
            whose bytes are not known.
        NotTraceable: the model's code reads the values of tensors.
    """
    whole = resolve(run, "cuda")
    refuse_unpredictable(whole.config)
    config = whole.config
    steps_to_take = STEPS
    if isinstance(routing, Replayed):  # the recorded counts fit only the steps that were recorded
        steps_to_take, micro_steps, routing = routing.steps, config.train.accumulate, routing.answers()
    shortened = shortened and micro_steps is None
    with faked(whole, routing, rank, gpu, shortened=shortened, received=received) as (adapted, short, mode):
        adapted.model.train()
        # DeepSpeed creates tensors here, which must be fake; torch's and bitsandbytes' optimizers read tensors' values
        makes_its_own = config.parallel.engine == "deepspeed"
        with mode if makes_its_own else nullcontext():
            steps = Steps(adapted, batches_of(adapted), None if short is None else short.stack.kept, gpu)
        with mode:
            is_timed = timed or config.parallel.ranks > 1  # ways to divide a run are also compared by their speed
            counts = is_timed and gpu is not None and gpu.bandwidth is not None
            tracker = steps.tracker(counts=counts, condensed=not simulated)
            if micro_steps is not None:
                traced = steps.run(tracker, micro_steps, steps=steps_to_take)
            else:
                most, least = 2 if micro_steps_are_alike(config.parallel) else 3, 1
                turns: Sequence[int] = ()
                if config.parallel.pp > 1 or whole.layer_by_layer:  # what all micro-batches hold exists at once
                    most, least = config.train.accumulate, config.parallel.pp
                if whole.layer_by_layer and shortened and isinstance(routing, AssumedRouting):
                    alike = Stack.of([None] * config.train.accumulate)
                    most, turns = len(alike.kept), alike.like
                stay_before = is_timed and whole.carried_layers  # which makes a step copy less
                if not (simulated or (timed and counts)) and steps.stepper.engine is None and not stay_before:
                    least = 0
                traced = steps.run(tracker, min(most, config.train.accumulate), first=least, short=short, turns=turns)
        return replace(traced, load=load_peaks(whole.held_at(Coordinates.of(config.parallel, rank).pp), traced))


@contextmanager
def faked(
    run: ResolvedRun,
    routing: AssumedRouting | CountRows,
    rank: int,
    gpu: Gpu | None,
    *,
    shortened: bool,
    received: CountReceived = received_as_sent,
) -> Iterator[tuple[Adapted, Shortened | None, QuickFakeMode]]:
    """Build a run's model on fake tensors for one rank; yield (model, shortened run, fake mode).

    The shortened run is None if every decoder layer runs. The mode is not active: enter it to compute.

    Args:
        routing: the number of tokens that each expert receives inside the context: an assumption, or a function that
            replaces `ExpertHooks.count_rows`.
        gpu: GPU whose compute capability the build assumes; None for a CPU.
        shortened: leave out layers that others can stand for, unless `routing` is a function or differs from layer to
            layer, or a tensor grows with the number of layers (`can_be_shortened`).
        received: replaces `ExpertHooks.count_received` inside the context.

    Raises:
        NotTraceable: code inside the context reads the values of tensors.
        UserError: the model cannot be built (`build`).
    """
    mode = QuickFakeMode(select_all=run.structure.model_type in _FULL_ROWS)
    is_even = isinstance(routing, AssumedRouting) and not routing.load
    count_rows = routing.count_rows if isinstance(routing, AssumedRouting) else routing
    without = () if gpu is None else run.config.hardware.without_kernels
    with using_kernels(but=without), fake_ranks(run.config.parallel, rank) as ranks:
        short = None
        if shortened and (run.config.parallel.pp > 1 or (is_even and can_be_shortened(run))):
            short = shorten(run, ranks, whole=not (is_even and can_be_shortened(run)))
        adapted = _build_fake(run if short is None else short.run, mode, ranks, None if gpu is None else gpu.capability)
        with (
            refusing_values(run.config.model.path, run.structure.model_type),
            adapted.expert_context.hooks.using(count_rows=count_rows, count_received=received),
            without_packages(adapted.model),
        ):
            yield adapted, short, mode


def _build_fake(run: ResolvedRun, mode: QuickFakeMode, ranks: Ranks, capability: Capability | None) -> Adapted:
    """Build the adapted model on the meta device with `build`, and replace every meta tensor by a fake one.

    `mode` creates the fake tensors; other arguments and errors are those of `build`. Several ranks need an initialized
    process group, for example torch's `fake` backend, which sends nothing.
    """
    add_missing_fakes()
    adapted = build(run, "meta", ranks=ranks, capability=capability)
    with mode:
        for module in adapted.model.modules():
            if isinstance(module, Linear4bit):
                module.weight = Nf4(run.config.model.double_quant).fake_weight(module.weight)
            fix_rotary_length(module)
        memo: dict[Tensor, Tensor] = {}
        for module in adapted.model.modules():
            tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
            for own in tables:
                for name, tensor in own.items():
                    if tensor is not None and tensor.is_meta:
                        own[name] = memo.setdefault(tensor, _fake(tensor))
                        if isinstance(module, HostModule) and name in module.names_on_host():
                            mark_on_host(own[name])
    distribute(adapted.model, adapted.structure, adapted.ranks)  # not in `mode`: device meshes are real tensors
    return adapted


def _fake(tensor: Tensor) -> Tensor:
    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


@contextmanager
def refusing_values(model: str, model_type: str) -> Iterator[None]:
    """Raise `NotTraceable` if the body of the `with` reads the values of fake tensors. `model`, its path or name, and
    `model_type` are for the message."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise NotTraceable(
            f"{model!r} cannot be traced: the code of model type {model_type!r} reads the values of tensors "
            f"({error.func})"
        ) from None


def can_be_shortened(run: ResolvedRun) -> bool:
    """Return whether a few decoder layers may stand for the others in a trace of this run.

    They may not where layers run several times, where the model has other stacks beside the decoder's (BLT's encoders,
    towers), or a tensor grows with their number: DeepSpeed concatenates all trained weights in one flat tensor, and
    router losses are computed from the router logits of all layers.
    """
    config, layers = run.config, every_layer(run.model.plain)
    grows = config.parallel.engine == "deepspeed" or config.train.router_aux_loss or config.train.router_z_loss
    return not (run.model.is_looped or grows or len(layers) > run.structure.num_layers)
