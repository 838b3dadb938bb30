"""Memory of `score`, `eval` and `generate`: forward passes on GPU or CPU.

A command gives its own passes (`Passes`), which here run on fake tensors; the model, its weights while they load, the
GPU's allocator and the host are as for training (`predict`, `trace`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from moetune.experts.context import CountRows
from moetune.memory.about import about
from moetune.memory.assumed_routing import BALANCED, AssumedRouting
from moetune.memory.host import host_of
from moetune.memory.predict import predict_memory
from moetune.memory.report import LoadPeaks, MemoryReport, RankMemory
from moetune.memory.trace import Trace
from moetune.memory.trace.loading import load_peaks
from moetune.memory.trace.log import Log
from moetune.memory.trace.tracing import faked
from moetune.memory.trace.tracker import Tracker
from moetune.memory.trace.watched import Watched
from moetune.models.catalog.gpus import Gpu
from moetune.run.resolve import ResolvedRun

Passes = Callable[[Watched, Tracker], None]
"""Runs the forward passes of a command with a model, and sets the phases of the tracker that records them."""


def predict_forward(
    run: ResolvedRun, passes: Passes, said: Mapping[str, str], *, gpu: str | Gpu | None = None, filled: int = 0
) -> MemoryReport:
    """Predict the peak memory of forward passes with the model of a run, without weights, data or a GPU.

    Args:
        run: resolved for the device that is meant: a GPU, or this machine's CPU, on which all tensors are host memory.
        passes: runs the command's passes with a model, given as `Watched`, under a tracker, whose phases it sets.
        said: label -> text, for the head of the report; replaces what training would say under the same label.
        gpu: a GPU's name, a size such as `44GiB`, or a catalog entry; None: `hardware.gpu`. Ignored on a CPU.
        filled: bytes of the largest tensor that is read into the model after it was built.

    Raises:
        UserError: as `predict`.
    """
    run = run.settled_as(None)
    tracing = partial(trace_forward, passes=passes, filled=filled)
    if run.device_type == "cuda":
        report = predict_memory(run, gpu=gpu, tracing=tracing)
    else:
        report = _on_cpu(run, tracing(run))
    lines = {**dict(report.about), **said}
    left_out = {"trains", "optimizer"}
    head = (*((label, lines.pop(label)) for label in said if label not in dict(report.about)), *lines.items())
    return replace(report, about=tuple(line for line in head if line[0] not in left_out))


def trace_forward(
    run: ResolvedRun,
    routing: AssumedRouting | CountRows = BALANCED,
    *,
    passes: Passes,
    rank: int = 0,
    gpu: Gpu | None = None,
    shortened: bool = True,
    filled: int = 0,
) -> Trace:
    """Trace the memory of forward passes on fake tensors. Raises the errors of `trace` (memory/trace/tracing.py).

    Args:
        routing: how many tokens each expert receives, or a function that counts them.
        rank: the number of the rank in `parallel:`.
        gpu: the GPU whose kernels run; None for the CPU's kernels.
        shortened: run only a few of the layers that are alike, which gives the same result sooner; ignored if `routing`
            differs from layer to layer.
        passes, filled: as in `predict_forward`.
    """
    with faked(run, routing, rank, gpu, shortened=shortened) as (adapted, short, mode):
        watched = Watched(adapted, None if short is None else short.stack.kept, gpu)
        with mode:
            log = follow(watched, watched.tracker(on_cpu=run.device_type == "cpu"), passes)
        traced = Trace.of(log, adapted.ranks.axis_of, short=short)
        load = load_peaks(run, traced)
        return replace(traced, load=LoadPeaks(max(load.host, filled), load.gpu))


def follow(watched: Watched, tracker: Tracker, passes: Passes) -> Log:
    """Run forward passes under a tracker of allocations, and return its log. Tensors may be fake or real."""
    watched.adapted.model.eval()
    watched.add_to(tracker)
    with watched.watching(tracker), torch.no_grad():
        passes(watched, tracker)
    tracker.stop()
    return tracker.log


def _on_cpu(run: ResolvedRun, traced: Trace) -> MemoryReport:
    """Return the report of a trace for this machine's CPU, where all tensors are in host memory."""
    parts, load, config = traced.parts(), traced.load, run.config
    assert load is not None
    tensors = max(load.gpu + traced.loaded(on_host=True), parts.total + traced.host_peak)
    return MemoryReport(
        model=config.model.path,
        gpu=None,
        ranks=(RankMemory(0, parts, 0, parts.total, traced.host_peak, tuple(traced.terms())),),
        assumptions=(f"routing: {BALANCED.name}",),
        load=load,
        moment=traced.moment(),
        timeline=traced.timeline(),
        about=about(run, None),
        host=host_of(config.hardware, None, tensors, 0),
        device="cpu",
    )
