"""A run's first steps under a tracker: the same code for fake tensors and for real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moetune.adapt.attention import wants_cu_seqlens
from moetune.adapt.build import Adapted
from moetune.compat.bitsandbytes import paged
from moetune.config.schema import RunConfig
from moetune.experts.context import CountRows
from moetune.memory.routing import Routing
from moetune.memory.time.work import COUNTING, READ, Work, size_of
from moetune.memory.trace.alike import Shortened
from moetune.memory.trace.log import OUTSIDE, Log
from moetune.memory.trace.tracker import Tracker
from moetune.memory.trace.views import Trace
from moetune.memory.trace.watched import Watched
from moetune.models.catalog.gpus import Gpu
from moetune.parallel.distribute import reshard
from moetune.parallel.ranks import local_tensor
from moetune.training.optim.offload import HostUpdater
from moetune.training.optim.optimizers import make_optimizer
from moetune.training.optim.updater import Updater
from moetune.training.step.batch import Batch, collate, random_rows
from moetune.training.step.loss import Chunks
from moetune.training.step.micro_step import count_loss_tokens, held_out_loss
from moetune.training.step.observer import StepObserver
from moetune.training.step.router_losses import RouterWatch
from moetune.training.step.stepper import Stepper

STEPS = 2
"""Optimizer states appear in the first step, for which one micro-step is enough; the second is like all that follow."""


def vocabulary_of(adapted: Adapted) -> int:
    """Size of the vocabulary."""
    embeddings: Any = adapted.model.get_input_embeddings()
    return embeddings.num_embeddings


def evaluated_rows(config: RunConfig) -> int:
    """Rows of a batch of held-out data; 0 if there are none."""
    if config.data is None or not config.data.evaluates:
        return 0
    return config.train.eval_micro_batch or config.train.micro_batch


def batches_of(
    adapted: Adapted, length: int | None = None, device: torch.device | None = None
) -> Callable[[int], Batch]:
    """Return a function that makes batches of so many rows as the run's data would give them.

    Args:
        length: tokens of a row; by default `train.sequence_length`.
    """
    config, vocabulary = adapted.run.config, vocabulary_of(adapted)
    packing, tokens = config.packs, length or config.train.sequence_length
    by_border = wants_cu_seqlens(adapted.model)

    def batch_of(rows: int) -> Batch:
        made = random_rows(rows, tokens, vocabulary, packing=packing)
        batch = collate(made, 0, at_least=tokens, documents_by_cu_seqlens=by_border)
        if device is None:
            return batch
        return {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}

    return batch_of


@dataclass(frozen=True)
class Feed:
    """Input of a step.

    Attributes:
        batch_of: a batch of so many rows.
        rows: of a micro-batch.
        held_out_rows: of a batch of held-out data that counts: one with more rows than those that train; else 0.
        chunks, held_out_chunks: of the loss; None: as `train.loss_memory` has it.
    """

    batch_of: Callable[[int], Batch]
    rows: int
    held_out_rows: int = 0
    chunks: Chunks | None = None
    held_out_chunks: Chunks | None = None


class Phases(StepObserver):
    """Notes the phases of each micro-step in a tracker's log."""

    def begin(self, tracker: Tracker, passes: int) -> None:
        """A micro-step begins, of so many passes, all but the last of which only measure."""
        self.tracker, self._left = tracker, passes
        self._forward()

    def _forward(self) -> None:
        self.tracker.enter("forward")
        self._began = len(self.tracker.log.entries)

    @contextmanager
    def backward(self) -> Iterator[None]:
        self.tracker.saved_since(self._began)
        self.tracker.enter("backward")
        yield
        self.tracker.cut(OUTSIDE, backward=True)
        self._left -= 1
        if self._left:
            self._forward()

    def eager_gradient(self, gradient: Tensor) -> None:
        self.tracker.tag([gradient], "gradients")


class Steps(Watched):
    """A run's first steps under a tracker.

    Args:
        kept: the numbers of the decoder layers that the model has; None if it has all.
        gpu: the card whose kernels run; None for the CPU's.
    """

    def __init__(
        self,
        adapted: Adapted,
        batch_of: Callable[[int], Batch],
        kept: Sequence[int] | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        self.config = config = adapted.run.config
        held_out = evaluated_rows(config)
        self.feed = Feed(batch_of, config.train.micro_batch, held_out if held_out > config.train.micro_batch else 0)
        self.trained = list(adapted.trainable().values())
        self.optimizer = make_optimizer(adapted)
        self.watch, self.phases = RouterWatch(adapted), Phases()
        self.stepper = Stepper(adapted, self.optimizer, self.watch, self.phases)
        engine = self.stepper.engine
        super().__init__(adapted, kept, gpu, {} if engine is None else dict(engine.weights()))

    def run(
        self,
        tracker: Tracker,
        micro_steps: int,
        *,
        first: int | None = None,
        steps: int = STEPS,
        tracking: bool = True,
        short: Shortened | None = None,
    ) -> Trace:
        """Take the steps, each of so many micro-steps, or the `first` one of fewer.

        Args:
            tracking: without it only phases and modules are noted.
            short: what the layers of a shortened model stand for.
        """
        with self._following(tracker, tracking), self._noting_counts(tracker):
            for step in range(steps):
                tracker.step = step
                self._step(tracker, self.feed, first if first and step == 0 else micro_steps)
                self._say_whose_states(tracker)
            self._evaluate(tracker, self.feed)
        self.watch.remove()
        tracker.stop()
        # A first step of fewer micro-steps takes no more than the last one, which has states beside it.
        left_out, axis_of = self.config.train.accumulate - micro_steps, self.adapted.ranks.axis_of
        return Trace.of(tracker.log, axis_of, short=short, left_out=left_out, last_step=bool(first))

    def one(self, tracker: Tracker, micro_steps: int) -> None:
        """One step, of which phases and modules are noted."""
        with self._following(tracker, False):
            self._step(tracker, self.feed, micro_steps)

    @torch.no_grad()
    def make_states(self) -> None:
        """Create the states of every optimizer, by an update with uninitialized gradients."""
        for updater in self.optimizer.updaters:
            _give_gradients(updater)
            updater.step()
            for parameter in updater.parameters:
                parameter.grad = None
        self.optimizer.zero_grad()

    def record(self, tracker: Tracker, feed: Feed, micro_steps: int, *, begun: int = 0) -> Log:
        """Take one step of the given input; optimizer states must exist.

        Args:
            begun: of its micro-steps so many are not taken: the gradients that they leave are there.
        """
        for updater in self.optimizer.updaters if begun else ():
            _give_gradients(updater)
        with self._following(tracker):
            self._step(tracker, feed, micro_steps, begun)
            self._evaluate(tracker, feed)
        tracker.stop()
        reshard(self.adapted.model)  # the next record begins as this one did
        return tracker.log

    def counting(self, routing: Routing | CountRows) -> AbstractContextManager[None]:
        """Let experts receive the assumed rows inside."""
        count_rows = routing.count_rows if isinstance(routing, Routing) else routing
        return self.adapted.expert_context.hooks.using(count_rows=count_rows)

    def _noting_counts(self, tracker: Tracker) -> AbstractContextManager[None]:
        """Count the work of counting experts' rows inside, which a trace assumes instead."""
        counter, hooks = tracker.counter, self.adapted.expert_context.hooks
        if counter is None:
            return nullcontext()
        assumed = hooks.count_rows

        def count_rows(layer: int, ids: Tensor, num_experts: int) -> list[int]:
            counter.note(COUNTING)
            return assumed(layer, ids, num_experts)

        return hooks.using(count_rows=count_rows)

    @contextmanager
    def _following(self, tracker: Tracker, tracking: bool = True) -> Iterator[None]:
        self.add_to(tracker)
        tracker.add(self.stepper.loss)
        for tensor in self.optimizer.masters():
            tracker.add(tensor, "master_weights", "float32 copies")
        for tensor in self.optimizer.states():
            tracker.add(tensor, "optimizer_states")
        for updater in self.optimizer.updaters:
            for tensor in _on_host(updater):
                tracker.add(tensor, "gradients")
        layer_of = self._layer_of()
        for name, parameter in self.adapted.trainable().items():
            if parameter.grad is not None:
                tracker.add(parameter.grad, "gradients", self.adapted.part_of(name))
                if parameter in layer_of:
                    tracker.belongs(parameter.grad, layer_of[parameter])
        self._say_whose_states(tracker)
        with tracker.following(self.trained), self.watching(tracker, tracking):
            yield

    def _layer_of(self) -> dict[nn.Parameter, int]:
        return {p: number for number, layer in self.layers.items() for p in layer.parameters()}

    def _say_whose_states(self, tracker: Tracker) -> None:
        """Optimizer states and float32 weights belong to the layer of their parameter."""
        layer_of = self._layer_of()
        parts = {parameter: self.adapted.part_of(name) for name, parameter in self.adapted.trainable().items()}
        for updater in self.optimizer.updaters:
            for parameter, updated in updater.updates():
                label = f"{parts[parameter]}: {self.config.optimizers[parts[parameter]].name}"
                states = updater.optimizer.state.get(updated, {})
                for tensor in (updated, *states.values(), *_on_host(updater)):
                    if isinstance(tensor, Tensor):
                        is_state = tensor is not updated and tensor is not parameter
                        tracker.belongs(tensor, layer_of.get(parameter), label if is_state else None)
                if self.gpu is not None:
                    for tensor in paged(updater.optimizer, updated):
                        tracker.moved_to_host(tensor, managed=True)

    def _step(self, tracker: Tracker, feed: Feed, micro_steps: int, begun: int = 0) -> None:
        for number in range(begun, micro_steps):
            tracker.micro_step = number
            tracker.enter("forward")
            batch = feed.batch_of(feed.rows)
            given = [value for value in batch.values() if torch.is_tensor(value)]
            tracker.tag(given, "saved_activations")
            if tracker.counter is not None:  # their copies, which the host waits for
                size = sum(map(size_of, given))
                tracker.counter.note(Work(synchronizations=len(given), copies=len(given), copied=size), "transfers")
            tokens, last = count_loss_tokens(batch) * micro_steps, number == micro_steps - 1
            self._micro_step(batch, tokens, tracker, feed.chunks, last=last)
            del batch
        tracker.enter("optimizer")
        self.stepper.finish()
        if tracker.counter is not None:  # the norm is looked at, and once more to clip
            tracker.counter.note(READ * (2 if self.config.train.max_grad_norm else 1))
        for tensor in self.optimizer.states():  # some were made before anything was followed: quantization maps
            tracker.add(tensor)
        tracker.tag(self.optimizer.states(), "optimizer_states")

    def _evaluate(self, tracker: Tracker, feed: Feed) -> None:
        """One batch of an evaluation, if it counts."""
        if not feed.held_out_rows:
            return
        tracker.enter("evaluation")
        batch = feed.batch_of(feed.held_out_rows)
        tracker.tag(filter(torch.is_tensor, batch.values()), "saved_activations")
        self.adapted.model.eval()
        held_out_loss(self.adapted.model, batch, feed.held_out_chunks or self.config.train.loss_bytes)
        self.adapted.model.train()

    def _micro_step(self, batch: Batch, tokens: Tensor, tracker: Tracker, chunks: Chunks | None, *, last: bool) -> None:
        self.phases.begin(tracker, passes=2 if self.stepper.measures_first else 1)
        self.stepper.micro_step(batch, tokens, last=last, chunks=chunks)
        tracker.tag(
            (local_tensor(p.grad) for p in self.trained if isinstance(p, DTensor) and p.grad is not None), "gradients"
        )
        if self.stepper.engine is not None:
            tracker.tag(self.stepper.engine.gradients(), "gradients")


def _on_host(updater: Updater) -> tuple[Tensor, ...]:
    """An updater's host copies of a gradient."""
    return (updater.wire, updater.gradient) if isinstance(updater, HostUpdater) else ()


def _give_gradients(updater: Updater) -> None:
    """Give the updater's parameters uninitialized gradients."""
    for parameter in updater.parameters:
        parameter.grad = torch.empty_like(parameter)
        if isinstance(updater, HostUpdater):
            updater.take(parameter)
