"""`Steps`: run training steps under a tracker, on fake or real tensors; their batches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moetune.adapt.attention import document_inputs
from moetune.adapt.build import Adapted
from moetune.compat.bitsandbytes import paged
from moetune.experts.context import ReadCounts
from moetune.memory.time.work import Work, size_of
from moetune.memory.trace.alike import Shortened
from moetune.memory.trace.log import OUTSIDE
from moetune.memory.trace.tracker import Tracker
from moetune.memory.trace.views import Trace
from moetune.memory.trace.watched import Watched
from moetune.models.catalog.gpus import Gpu
from moetune.parallel.distribute import micro_steps_are_alike
from moetune.parallel.ranks import local_tensor
from moetune.run.stages import stages_a_rank
from moetune.training.optim.offload import HostUpdater
from moetune.training.optim.optimizers import make_optimizer
from moetune.training.optim.updater import Updater
from moetune.training.step.batch import Batch, collate, random_rows
from moetune.training.step.micro_step import count_loss_tokens
from moetune.training.step.observer import StepObserver
from moetune.training.step.router_losses import RouterWatch
from moetune.training.step.stepper import Stepper

STEPS = 2
"""Steps that a trace runs. Optimizer states are created in the first; the second is like all that follow."""


def vocabulary_of(adapted: Adapted) -> int:
    """Return the size of a model's vocabulary: the number of rows of its input embedding."""
    embeddings: Any = adapted.model.get_input_embeddings()
    return int(embeddings.num_embeddings)


def batches_of(
    adapted: Adapted, length: int | None = None, device: torch.device | None = None
) -> Callable[[int], Batch]:
    """Return a function that makes a batch of random tokens from a number of rows.

    A batch has the tensors and shapes of the run's own data: packed rows of two documents each, or padded rows with an
    attention mask. `length` are the tokens of a row, by default `train.sequence_length`. The tensors are moved to
    `device`; by default they stay on the CPU, as fake tensors under a fake mode.
    """
    config, vocabulary = adapted.run.config, vocabulary_of(adapted)
    packing, tokens = config.packs, length or config.train.sequence_length
    documents = document_inputs(adapted.model)

    def batch_of(rows: int) -> Batch:
        made = random_rows(rows, tokens, vocabulary, packing=packing)
        batch = collate(made, 0, at_least=tokens, document_inputs=documents)
        if device is None:
            return batch
        return {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}

    return batch_of


class Phases(StepObserver):
    """Records the forward and backward phases of each micro-step in a tracker's log."""

    def begin(self, tracker: Tracker, passes: int) -> None:
        """Start a micro-step of `passes` forward and backward passes, of which all but the last only measure the
        gradient norm."""
        self.tracker, self._left = tracker, passes
        self._forward()

    def _forward(self) -> None:
        self.tracker.enter("forward")
        self._began = len(self.tracker.log.entries)

    @contextmanager
    def backward(self, losses: Sequence[Tensor] = ()) -> Iterator[None]:
        """Mark what forward saved, then record the backward phase within the `with` block. After it, the next forward
        phase begins, if the micro-step has another pass."""
        self.tracker.saved_since(self._began)
        self.tracker.enter("backward")
        for number, loss in enumerate(losses):
            loss.register_hook(lambda _, number=number: self.tracker.take_turn(number))
        yield
        self.tracker.take_turn(OUTSIDE)
        self.tracker.cut(OUTSIDE, backward=True)
        self._left -= 1
        if self._left:
            self._forward()

    def turn(self, micro_batch: int) -> AbstractContextManager[None]:
        """Record whose turn it is within the `with` block."""
        return self.tracker.turn_of(micro_batch)

    def eager_gradient(self, gradient: Tensor) -> None:
        """Mark a tensor that an expert bank computed outside of autograd as a gradient."""
        self.tracker.tag([gradient], "gradients")


class Steps(Watched):
    """The training steps of a model, run by the trainer's own `Stepper` and recorded by a tracker. Creates the
    optimizer and the stepper.

    Call `run` once for a trace of whole steps. Under fake tensors `ExpertHooks.count_rows` must give the tokens of each
    expert (`faked`).

    Args:
        adapted: model to train; its tensors may be fake.
        batch_of: makes a batch from a number of rows, as `batches_of` returns it.
        kept: numbers, in the whole model, of the decoder layers that run; None to number the layers from 0.
        gpu: GPU whose attention kernels and workspaces are assumed; None for a CPU.

    Attributes:
        held_out_rows: rows of an evaluation's batch, or 0 to run no evaluation. Only a batch with more rows than a
            micro-batch can take more memory than training.
        trained: the trainable parameters.
        watch: hooks that count expert load; `run` removes them at its end, the other methods do not.
        phases: recorder of the forward and backward phases.
    """

    def __init__(
        self,
        adapted: Adapted,
        batch_of: Callable[[int], Batch],
        kept: Sequence[int] | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        self.config = config = adapted.run.config
        train, evaluates = config.train, config.data is not None and config.data.evaluates
        self.batch_of = batch_of
        held_out = (train.eval_micro_batch or 0) if evaluates else 0
        self.held_out_rows = held_out if held_out > train.micro_batch else 0
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
        turns: Sequence[int] = (),
    ) -> Trace:
        """Run steps, then an evaluation if its batch is larger than a micro-batch, and return the trace. Can be called
        once: it removes the hooks that count expert load.

        Args:
            micro_steps: micro-steps of each step.
            first: micro-steps of the first step, None for `micro_steps`. If given, only the last step's peak counts; 0
                only creates the optimizer states, and the gradients of earlier micro-steps if `adds_to_gradients`.
            tracking: False to record only phases, modules and layer boundaries, and no operations.
            short: layers that ran and groups that stand for others; None if all layers ran.
            turns: for each micro-batch of the last step, the one that runs that stands for it; empty if none does.

        Raises:
            UserError: the last step calls a collective whose bytes are not known.
        """
        before = int(first == 0 and self.adds_to_gradients)
        with self._following(tracker, tracking), self._noting_counts(tracker):
            for step in range(steps):
                tracker.step = step
                if first == 0 == step:
                    self._create_states(tracker)
                else:
                    self._step(tracker, first if first and step == 0 else micro_steps, before)
                self._say_whose_states(tracker)
            self._evaluate(tracker)
        self.watch.remove()
        tracker.stop()
        # A first step of fewer micro-steps takes no more than the last, in which optimizer states exist from the start.
        left_out = 0 if turns else self.config.train.accumulate - micro_steps + before
        axis_of, last_step = self.adapted.ranks.axis_of, first is not None
        return Trace.of(tracker.log, axis_of, short=short, turns=turns, left_out=left_out, last_step=last_step)

    @property
    def adds_to_gradients(self) -> bool:
        """Whether a step's later micro-steps are alike and add to gradients on the GPU."""
        alike = micro_steps_are_alike(self.config.parallel) and not self.stepper.takes_all
        on_host = any(updater.on_host for updater in self.optimizer.updaters)
        return alike and self.config.train.accumulate > 1 and not on_host

    def _noting_counts(self, tracker: Tracker) -> AbstractContextManager[None]:
        """Return a context in which the tracker counts, for each count of experts' tokens, the work of reading it from
        the GPU: with assumed tokens none is read."""
        hooks = self.adapted.expert_context.hooks
        assumed = hooks.count_rows

        def count_rows(layer: int, ids: Tensor, num_experts: int, read: ReadCounts) -> list[int]:
            tracker.note(Work(synchronizations=1))
            return assumed(layer, ids, num_experts, read)

        return hooks.using(count_rows=count_rows)

    @contextmanager
    def _following(self, tracker: Tracker, tracking: bool = True) -> Iterator[None]:
        """Register weights, optimizer states and gradients that exist, then record within the `with` block; without
        `tracking` only phases, modules and layer boundaries, no operations."""
        self.add_to(tracker)
        tracker.add(self.stepper.loss)
        for tensor in self.optimizer.masters():
            tracker.add(tensor, "master_weights", "float32 copies")
        for tensor in self.optimizer.states():
            tracker.add(tensor, "optimizer_states")
        for updater in self.optimizer.updaters:
            for tensor in _on_host(updater):
                tracker.add(tensor, "gradients")
        self._add_gradients(tracker)
        self._say_whose_states(tracker)
        with tracker.following(self.trained), self.watching(tracker, tracking):
            yield

    def _add_gradients(self, tracker: Tracker) -> None:
        """Register the gradients that exist."""
        for name, parameter in self.adapted.trainable().items():
            if parameter.grad is not None:
                gradient = local_tensor(parameter.grad)
                tracker.add(gradient)
                tracker.tag([gradient], "gradients")
                tracker.belongs(gradient, self.layer_of.get(parameter), self.adapted.part_of(name))

    def _say_whose_states(self, tracker: Tracker) -> None:
        """Set the decoder layer of optimizer states and float32 weights, and the label of the states; mark paged states
        as host memory."""
        parts = {parameter: self.adapted.part_of(name) for name, parameter in self.adapted.trainable().items()}
        for updater in self.optimizer.updaters:
            for parameter, updated in updater.updates():
                label = f"{parts[parameter]}: {self.config.optimizers[parts[parameter]].name}"
                states = updater.optimizer.state.get(updated, {})
                for tensor in (updated, *states.values(), *_on_host(updater)):
                    if isinstance(tensor, Tensor):
                        is_state = tensor is not updated and tensor is not parameter
                        tracker.belongs(tensor, self.layer_of.get(parameter), label if is_state else None)
                if self.gpu is not None and not updater.on_host:  # on the host nothing is paged
                    for tensor in paged(updater.optimizer, updated):
                        tracker.moved_to_host(tensor, managed=True)

    def _step(self, tracker: Tracker, micro_steps: int, before: int) -> None:
        """Run the micro-steps of a step after those `before`, then the update."""
        if self.stepper.takes_all:
            self._together(tracker, micro_steps)
        for number in range(before, micro_steps if not self.stepper.takes_all else 0):
            tracker.micro_step = number
            tracker.enter("forward")
            batch = self._batch(tracker)
            tokens, last = count_loss_tokens(batch) * micro_steps, number == micro_steps - 1
            self._micro_step(batch, tokens, tracker, last=last)
            del batch
        tracker.enter("optimizer")
        self.stepper.finish()
        # the host reads the gradient norm, and once more to clip
        tracker.note(Work(synchronizations=2 if self.config.train.max_grad_norm else 1))
        self._add_states(tracker)

    def _create_states(self, tracker: Tracker) -> None:
        """Update each parameter once, with a gradient of no micro-step."""
        tracker.enter("optimizer")
        for updater in self.optimizer.updaters:
            for parameter in updater.parameters:
                parameter.grad = torch.empty_like(parameter)
                if isinstance(updater, HostUpdater):
                    updater.take(parameter)
                    updater.host_copies.finish()
            updater.step()
            for parameter in () if self.adds_to_gradients else updater.parameters:
                parameter.grad = None
        self._add_states(tracker)
        self._add_gradients(tracker)

    def _add_states(self, tracker: Tracker) -> None:
        for tensor in self.optimizer.states():  # quantization maps were created before the tracker was active
            tracker.add(tensor)
        tracker.tag(self.optimizer.states(), "optimizer_states")

    def _batch(self, tracker: Tracker) -> Batch:
        """Return a micro-batch as it arrives on the GPU."""
        batch = self.batch_of(self.config.train.micro_batch)
        given = [value for value in batch.values() if torch.is_tensor(value)]
        tracker.tag(given, "saved_activations")
        # copies of the batch to the GPU, for which the host waits
        tracker.note(Work(synchronizations=len(given), copied=sum(map(size_of, given))), "transfers")
        return batch

    def _together(self, tracker: Tracker, micro_steps: int) -> None:
        """Run the micro-steps of a step layer by layer, or over the stages of the pipeline, as far as this rank takes
        part."""
        tracker.micro_step = 0
        tracker.enter("forward")
        batches = []
        for number in range(micro_steps):
            with tracker.turn_of(number):
                batches.append(self._batch(tracker))
        if self.config.parallel.pp > 1:
            passes = micro_steps * stages_a_rank(self.config.parallel)
        else:
            passes, self.turns = 2 if self.stepper.measures_first else 1, micro_steps
        self.phases.begin(tracker, passes)
        self.stepper.micro_steps(batches, count_loss_tokens(batches[0]) * micro_steps)
        self.turns = 1

    def _evaluate(self, tracker: Tracker) -> None:
        """Run one batch of an evaluation, if there are rows for it."""
        if not self.held_out_rows:
            return
        tracker.enter("evaluation")
        batch = self.batch_of(self.held_out_rows)
        tracker.tag(filter(torch.is_tensor, batch.values()), "saved_activations")
        self.adapted.model.eval()
        self.stepper.held_out_loss([batch] * (self.config.train.accumulate if self.config.parallel.pp > 1 else 1))
        self.adapted.model.train()

    def _micro_step(self, batch: Batch, tokens: Tensor, tracker: Tracker, *, last: bool) -> None:
        self.phases.begin(tracker, passes=2 if self.stepper.measures_first else 1)
        self.stepper.micro_step(batch, tokens, last=last)
        tracker.tag(
            (local_tensor(p.grad) for p in self.trained if isinstance(p, DTensor) and p.grad is not None), "gradients"
        )
        if self.stepper.engine is not None:
            tracker.tag(self.stepper.engine.gradients(), "gradients")


def _on_host(updater: Updater) -> tuple[Tensor, ...]:
    """Return the tensors in host memory that receive an updater's gradients; none unless it updates on the host."""
    return (updater.wire, updater.gradient) if isinstance(updater, HostUpdater) else ()
