"""`moetune score --predict`: predict the peak memory of scoring from a trace of its forward pass."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from moetune.experts.context import CountRows
from moetune.memory.assumed_routing import BALANCED, AssumedRouting
from moetune.memory.predict import predict
from moetune.memory.report import MemoryReport
from moetune.memory.trace import Trace, vocabulary_of
from moetune.memory.trace.loading import load_peaks
from moetune.memory.trace.log import Log
from moetune.memory.trace.tracing import faked
from moetune.memory.trace.tracker import Tracker
from moetune.memory.trace.watched import Watched
from moetune.models.catalog.gpus import Gpu
from moetune.routing.recorder import Recorder, layer_of
from moetune.routing.score import record_batch, refuse_dense
from moetune.run.keeps import is_open
from moetune.run.resolve import ResolvedRun
from moetune.training.step.batch import random_rows


def predict_score(
    run: ResolvedRun,
    sources: int = 1,
    *,
    gpu: str | None = None,
) -> MemoryReport:
    """Predict the peak memory of `score`, without weights, data or a GPU.

    The run's config must come from `to_score`. `sources` is the number of data sets, whose statistics are added up
    separately and take memory; `gpu` is as in `predict`.

    Raises:
        UserError: the model has no experts; or as `predict`.
    """
    refuse_dense(run)
    tracing = partial(trace_score, sources=sources)
    run = run.keeping({}) if is_open(run.config.train) else run
    report = predict(run, method="trace", gpu=gpu, advise=False, tracing=tracing)
    train = run.config.train
    lines = dict(report.about) | {"batch": f"{train.micro_batch} × {train.sequence_length:,} tokens, forward alone"}
    left_out = ("trains", "optimizer")
    about = (("scores", f"{sources} data sets" if sources > 1 else "one data set"), *lines.items())
    return replace(report, rows=None, about=tuple(line for line in about if line[0] not in left_out))


def trace_score(
    run: ResolvedRun,
    routing: AssumedRouting | CountRows = BALANCED,
    *,
    sources: int = 1,
    rank: int = 0,
    gpu: Gpu | None = None,
    shortened: bool = True,
) -> Trace:
    """Trace the memory of scoring on fake tensors. Raises the errors of `trace` (memory/trace/tracing.py).

    Args:
        routing: how many tokens each expert receives, or a function that counts them.
        rank: the number of the rank in `parallel:`.
        gpu: the GPU whose kernels run; None for the CPU's kernels.
        shortened: run only a few of the layers that are alike, which gives the same result sooner; ignored if `routing`
            differs from layer to layer.
    """
    is_even = isinstance(routing, AssumedRouting) and not routing.load
    count_rows = routing.count_rows if isinstance(routing, AssumedRouting) else routing
    with faked(run, rank, gpu, shortened=shortened and is_even) as (adapted, short, mode):
        watched = Watched(adapted, None if short is None else short.kept, gpu)
        with mode, adapted.expert_context.hooks.using(count_rows=count_rows):
            log = follow(watched, watched.tracker(), sources)
        traced = Trace.of(log, adapted.ranks.axis_of, short=short)
        return replace(traced, load=load_peaks(run, traced))


def follow(watched: Watched, tracker: Tracker, sources: int = 1, *, tracking: bool = True) -> Log:
    """Score random tokens under a tracker of allocations, and return its log.

    One batch of each source is read, then a second batch of the last source, whose sums are added to existing ones; all
    further batches would be like this one. The model may be on fake tensors or on a real device. Without `tracking`,
    only the starts and ends of layers and experts are recorded.
    """
    adapted = watched.adapted
    adapted.model.eval()
    recorder, train = Recorder(adapted), adapted.run.config.train
    vocabulary = vocabulary_of(adapted)
    watched.add_to(tracker)
    with watched.watching(tracker, tracking), torch.no_grad():
        for number, source in enumerate((*range(sources), sources - 1)):
            tracker.step = number
            tracker.enter("forward")
            rows = random_rows(train.micro_batch, train.sequence_length, vocabulary, packing=adapted.run.config.packs)
            record_batch(recorder, adapted, rows, 0, source, number, at_least=train.sequence_length)
            for name, tensor in recorder.sums.items():
                layer = layer_of(name)
                if layer is not None:
                    tracker.belongs(tensor, layer)
    recorder.remove()
    tracker.stop()
    return tracker.log
