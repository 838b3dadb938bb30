"""An optimizer step: micro-steps, reduction over ranks, clipping, update.

Training, memory predictions and memory measurements all run this code. There are three kinds of step:

    plain                  forward and backward of each micro-batch; norm of the gradients; update of all parameters
    fused                  forward and backward, which updates fused parameters on the way; update of the others
    fused, with a norm     forward and backward that only measures the norm of all gradients; then forward and backward
                           again, with the same random numbers, which updates (LOMO, arXiv 2306.09782, section 3.3)

A gradient that is not finite never updates a weight. A plain step, and a fused step with a norm, then updates no weight
at all; a fused step without a norm has already updated the parameters that the backward pass reached before.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn

from moetune.adapt.build import Adapted
from moetune.errors import UserError
from moetune.experts.host import on_device
from moetune.models.stack import below_head
from moetune.parallel.distribute import set_gradient_sync
from moetune.parallel.ranks import local_tensor
from moetune.training.optim.optimizers import CombinedOptimizer
from moetune.training.optim.values import as_float, bound_, generator_states, norm_of, set_generator_states
from moetune.training.optim.zero import ZeroUpdater
from moetune.training.step.batch import Batch
from moetune.training.step.fused import FusedBackward
from moetune.training.step.layer_by_layer import layer_by_layer
from moetune.training.step.micro_step import MicroStep, count_loss_tokens, forward_pass, held_out_loss
from moetune.training.step.observer import StepObserver
from moetune.training.step.pipelined import Pipeline
from moetune.training.step.router_bias import RouterBiases
from moetune.training.step.router_losses import RouterWatch

T = TypeVar("T")


@dataclass(frozen=True)
class Reduced:
    """The gradients of a step after reduction over all ranks.

    Attributes:
        norm: 2-norm of all gradients, before `train.max_grad_norm` clips it, without the loss scale; on the device.
        loss: mean cross-entropy of the step's predicted tokens, a scalar on the device.
        scale: factor of the gradients in the update, which clips them to `train.max_grad_norm` and undoes the loss
            scale; None if a gradient is not finite, so that no update follows.
    """

    norm: Tensor
    loss: Tensor
    scale: float | None


class Stepper:
    """Runs optimizer steps: `micro_step` for each micro-batch, or `micro_steps` for all of them if `takes_all`, then
    `finish` (`reduce_and_clip` and `update`).

    Attributes:
        watch: records routing.
        observer: notified of backward passes.
        takes_all: whether the micro-batches of a step must be given together: to a pipeline, or layer by layer.
        engine: DeepSpeed's engine if it reduces and updates; None otherwise.
        fused: the hooks that update or offload parameters in the backward pass; None if there are no such parameters.
        loss_scale: dynamic loss scale of float16 runs; None in others.
        skipped: number of steps without an update, because a gradient was not finite.
        loss: sum of `MicroStep.loss` over this step's micro-batches so far on this rank, a scalar on the device.
    """

    def __init__(
        self,
        adapted: Adapted,
        optimizer: CombinedOptimizer,
        watch: RouterWatch | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        self.adapted, self.config, self.optimizer = adapted, adapted.run.config, optimizer
        self.watch, self.observer = watch or RouterWatch(adapted), observer or StepObserver()
        self.loss_scale, self.skipped = optimizer.loss_scale, 0
        self._biases = RouterBiases(adapted)
        self.fused = None
        if any(updater.fused or updater.on_host for updater in optimizer.updaters):
            self.fused = FusedBackward(adapted, optimizer, self.observer)
        self.engine = next((u.engine for u in optimizer.updaters if isinstance(u, ZeroUpdater)), None)
        self._updates_in_backward = any(updater.fused for updater in optimizer.updaters)
        self._stack = below_head(adapted.model)
        self._pipeline = Pipeline(adapted, self.watch) if adapted.ranks.parallel.pp > 1 else None
        self.takes_all = self._pipeline is not None or adapted.run.layer_by_layer
        self._of_experts = set(adapted.of_experts())
        self.loss = torch.zeros((), device=adapted.model.device)
        # norm of the gradients freed in backward, and names of those that were not finite
        self._freed: tuple[Tensor | None, list[str]] = None, []

    @property
    def measures_first(self) -> bool:
        """Whether each micro-batch runs twice, because updates in the backward pass need the norm of all gradients."""
        return self._updates_in_backward and (self.config.train.max_grad_norm > 0 or self.loss_scale is not None)

    # --- Forward and backward of each micro-batch -------------------------------------------------------------------

    def micro_step(self, batch: Batch, total_tokens: Tensor | int, *, last: bool = True) -> MicroStep:
        """Run the forward and backward pass of a micro-batch; twice if the gradient norm must be known first.

        Args:
            total_tokens: predicted tokens of the whole step, over micro-batches and ranks.
            last: whether this is the last micro-batch of its step, after which the ranks' gradients are reduced.
        """
        return self.micro_steps([batch], total_tokens, last=last)[0]

    def _counted(self, done: list[MicroStep]) -> list[MicroStep]:
        """Add the losses and the expert load of micro-steps to those of the step."""
        for number, result in enumerate(done):
            with self.observer.turn(number) if len(done) > 1 else nullcontext():
                self.loss = self.loss + result.loss
                self._biases.count(result.load)
        return done

    def micro_steps(
        self, batches: Sequence[Batch], total_tokens: Tensor | int, *, last: bool = True
    ) -> list[MicroStep]:
        """Run micro-batches: one, or if `takes_all` all of a step, layer by layer or over the stages of the pipeline,
        of which every rank must call this.

        Args:
            batches: of a pipeline `train.accumulate`, of equal shapes, the same on every rank.
            total_tokens, last: as in `micro_step`.
        """
        if self._pipeline is not None:
            memory = self.adapted.run.loss_memory
            return self._counted(self._pipeline.run(batches, total_tokens, memory, self.observer.backward, self._scale))
        set_gradient_sync(self._stack, self.adapted.ranks, last=last)
        once = partial(self._passes, batches, total_tokens, last=last)
        return self._counted(once() if self.fused is None else self._fused_passes(self.fused, once))

    def _passes(self, batches: Sequence[Batch], total_tokens: Tensor | int, *, last: bool) -> list[MicroStep]:
        """Run forward passes, layer by layer if `takes_all`, and one backward pass of the sum of their losses, times
        the loss scale."""
        model, run, prefetcher = self.adapted.model, self.adapted.run, self.adapted.expert_context.prefetcher
        forwards = [
            partial(forward_pass, model, batch, total_tokens, self.watch, self.config.train, run.loss_memory)
            for batch in batches
        ]
        summands: tuple[Tensor, ...] = ()
        done: Sequence[MicroStep]
        if self.takes_all:
            with nullcontext() if prefetcher is None else prefetcher.shared():
                summands, done = zip(*layer_by_layer(model, forwards, self.observer.turn), strict=True)
            loss = torch.stack(summands).sum()
        else:
            loss, *done = forwards[0]()
        scaled = loss if self.loss_scale is None else loss * self.loss_scale.value
        with self.observer.backward(summands):
            try:
                if self.engine is None:
                    scaled.backward()
                else:
                    self.engine.backward(scaled, last=last)
            except Exception:
                _wait_for_autograd(scaled.detach())
                raise
        return list(done)

    @torch.no_grad()
    def held_out_loss(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Return (summed token loss, number of predicted tokens), scalars on the device: of a batch, or of a pipeline,
        of which every rank must call this, of `train.accumulate` batches of equal shapes.
        """
        memory = self.adapted.run.loss_memory
        if self._pipeline is None:
            return held_out_loss(self.adapted.model, batches[0], memory)
        losses = [done.loss for done in self._pipeline.run(batches, 1, memory, None)]
        loss = self.adapted.ranks.total_over_stages(torch.stack(losses).sum())
        return loss, torch.stack([*map(count_loss_tokens, batches)]).sum()

    def _fused_passes(self, fused: FusedBackward, once: Callable[[], T]) -> T:
        """Run micro-batches, by `once`, so that their backward pass updates or offloads each parameter of `fused`.

        If `measures_first`, it runs twice: to measure the norm, and, unless a gradient is not finite, to update.
        """
        train, device = self.config.train, self.adapted.model.device
        # Without updates in backward, `_norm` clips the sums over all micro-batches.
        bound = train.max_grad_value * self._scale if self._updates_in_backward else 0.0
        if not self.measures_first:
            with fused.updating(1.0, bound, checked=False) as measured:
                done = once()
            self._freed = measured.norm(), measured.broken()
            return done
        states = generator_states(device)
        with fused.measuring(bound) as measured:
            done = once()
        norm = measured.norm()
        assert norm is not None, "nothing trains"
        norm, broken = norm / self._scale, measured.broken()
        self._freed = norm, broken
        del measured  # it holds a scalar tensor for each gradient
        if broken:
            return done
        set_generator_states(states, device)
        with fused.updating(self._clip_by(norm) / self._scale, bound, checked=True):
            return once()

    # --- Reduce and clip ----------------------------------------------------------------------------------------------

    def reduce_and_clip(self) -> Reduced:
        """Sum the gradients over all ranks, and clip each element to ±`train.max_grad_value`; return norm, loss and the
        scale that `update` applies.

        Call it after the last micro-step, on every rank. If a gradient is not finite, the loss scale is halved or, in a
        run without one, `train.on_nonfinite` decides; `skipped` counts the step, and its scale is None.

        Raises:
            UserError: a gradient is not finite, and `train.on_nonfinite` is `stop` or the loss scale falls below 1.
        """
        left = {p: p.grad for p in self.optimizer.parameters() if p.grad is not None and self.engine is None}
        self.adapted.ranks.reduce(left, self._of_experts)
        loss, (freed, broken) = self.loss, self._freed
        self.loss, self._freed = torch.zeros_like(loss), (None, [])
        norm, loss = self._over_ranks(self._norm(left, freed), loss)
        if math.isfinite(as_float(norm + 0 * loss)) and not broken:
            scale = self._clip_by(norm) / self._scale
            if self.loss_scale is not None:
                self.loss_scale.went_well()
            return Reduced(norm, loss, scale)
        self._refuse(broken or self._broken_among(left))
        if self.engine is not None:
            self.engine.forget()
        self.skipped += 1
        return Reduced(norm, loss, None)

    def _norm(self, left: dict[nn.Parameter, Tensor], freed: Tensor | None) -> Tensor | None:
        """Clip this rank's gradients to ±`train.max_grad_value`; return its share of their norm without the loss scale.

        Gradients that DeepSpeed reduces, or that the backward pass measured, are not clipped here. The squares of all
        ranks' shares sum to the squared norm. None if this rank has no gradients.

        Args:
            left: parameter -> gradient that is still in device memory.
            freed: norm of the gradients that the backward pass measured and freed.
        """
        if self.engine is not None:  # DeepSpeed has reduced them, so this is the norm over all ranks
            return self.engine.norm() / math.sqrt(self.adapted.ranks.parallel.ranks)
        if self.measures_first:
            return freed
        if self.config.train.max_grad_value:
            bound = self.config.train.max_grad_value * self._scale
            for gradient in left.values():
                bound_(local_tensor(gradient), bound)
            for updater in self.optimizer.on_host():
                updater.bound(bound)
        norms = [] if freed is None else [freed]
        by_copies: dict[int, list[Tensor]] = {}  # a gradient that n ranks have counts 1/n of its square on each
        for parameter, gradient in left.items():
            copies = self.adapted.ranks.copies(parameter, of_expert=parameter in self._of_experts)
            by_copies.setdefault(copies, []).append(local_tensor(gradient))
        norms += [norm_of(parts) / math.sqrt(copies) / self._scale for copies, parts in by_copies.items()]
        of_host = [n for u in self.optimizer.on_host() if (n := u.norm()) is not None]
        norms += [on_device(norm_of(of_host), self.adapted.model.device) / self._scale] if of_host else []
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else None

    def _over_ranks(self, norm: Tensor | None, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of all ranks' gradients and the sum of their losses, with a single all-reduce.

        `norm` is this rank's share (`_norm`), None without gradients; `loss` is this rank's.
        """
        ranks = self.adapted.ranks
        if ranks.is_single:
            assert norm is not None, "no micro-step came before"
            return norm, loss
        square = torch.zeros_like(loss) if norm is None else norm.square()  # None on a rank without trained parameters
        both = ranks.total(torch.stack([square, loss / ranks.parallel.tp]))
        return both[0].sqrt(), both[1]

    @property
    def _scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def _clip_by(self, norm: Tensor) -> float:
        bound = self.config.train.max_grad_norm
        return min(1.0, bound / (as_float(norm) + 1e-6)) if bound else 1.0

    def _broken_among(self, gradients: dict[nn.Parameter, Tensor]) -> list[str]:
        """Return the names of parameters whose gradient is not finite on any rank, in the order of backward."""
        trained = reversed([*self.adapted.trainable().items()])
        if self.engine is not None:
            return [name for name, p in trained if not self.engine.gradient(p).isfinite().all()]
        of_host = {u.parameters[0]: u.gradient for u in self.optimizer.on_host() if u.norm() is not None}
        known = gradients | of_host
        mine = [name for name, p in trained if p in known and not local_tensor(known[p]).isfinite().all()]
        return list(dict.fromkeys(chain.from_iterable(self.adapted.ranks.gather(mine))))

    def _refuse(self, broken: list[str]) -> None:
        if self.loss_scale is not None:
            self.loss_scale.overflowed()
        elif self.config.train.on_nonfinite == "stop":
            others = f" and of {len(broken) - 1} others" if len(broken) > 1 else ""
            raise UserError(
                f"the gradient of {broken[0] if broken else 'some parameter'}{others} is not finite. No weight was "
                "updated with it. Lower optimizer.lr or train.max_grad_norm; --resume PATH continues from a checkpoint "
                "before it went wrong. train.on_nonfinite: skip leaves such steps out"
            )

    # --- Update -------------------------------------------------------------------------------------------------------

    def update(self, reduced: Reduced) -> None:
        """Update the parameters that the backward pass did not, and router biases, then free all gradients.

        If `reduced.scale` is None, nothing is updated.
        """
        if reduced.scale is not None:
            self.optimizer.step(scale=reduced.scale)
            self._biases.update()
        else:
            self._biases.forget()
        self.optimizer.zero_grad()

    def forget(self) -> None:
        """Discard the gradients, loss and expert load of this step, which must not have updated any weight yet."""
        self.optimizer.zero_grad()
        self._biases.forget()
        self.loss, self._freed = torch.zeros_like(self.loss), (None, [])

    def finish(self) -> Reduced:
        """Call `reduce_and_clip` and then `update`, after the last micro-step; return the result of the first."""
        reduced = self.reduce_and_clip()
        self.update(reduced)
        return reduced


def _wait_for_autograd(value: Tensor) -> None:
    """Wait until autograd's thread for the device of `value` has let go of a backward pass that raised an exception.

    The exception reaches this thread first. A process that exits before the other one is done is aborted (exit code
    134), and a step that is repeated finds less free memory. Each device has one thread, which runs a backward pass
    after another; so this runs one that allocates nothing.
    """
    leaf = value.detach().requires_grad_()
    torch.autograd.grad(leaf.view_as(leaf), leaf, value)
