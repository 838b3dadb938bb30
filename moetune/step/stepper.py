"""A whole optimizer step: micro-steps, the look at their gradients, the update.

The trainer runs it; whatever predicts or verifies its memory runs it too. Three kinds of step:

    plain                  forward and backward of each micro-batch; norm; update of everything
    fused                  forward and backward, which updates what is fused; update of the rest
    fused, with a norm     forward and backward that only measures the norm of all gradients; then the same again, from
                           the same random numbers, which updates (LOMO, arXiv 2306.09782, section 3.3)

No gradient that is not finite touches a weight. Where one turns up before anything was updated (plain steps, and fused
ones with a norm) nothing is; in a fused step without norm, what backward passed before it has been updated by then, and
nothing after it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from moetune.adapt.build import Adapted
from moetune.anatomy.stack import decoder_stack
from moetune.config import RunConfig
from moetune.errors import UserError
from moetune.parallel.distribute import set_meeting
from moetune.parallel.ranks import here
from moetune.step.fused import FusedBackward
from moetune.step.loss_scale import LossScale
from moetune.step.optimizers import CombinedOptimizer
from moetune.step.router_losses import RouterWatch
from moetune.step.step import Batch, MicroStep, micro_step
from moetune.step.values import as_float, bound_, generator_states, norm_of, set_generator_states
from moetune.step.zero import ZeroUpdater


class Stepper:
    """Takes the steps of one run.

    Attributes:
        around_backward: what is entered for each backward pass.
        engine: DeepSpeed's, if it is the one that updates.
        skipped: steps that were not taken, because a gradient was not finite.
        loss: of the step that was looked at last, over all ranks.
    """

    def __init__(
        self, adapted: Adapted, config: RunConfig, optimizer: CombinedOptimizer, watch: RouterWatch | None = None
    ) -> None:
        self.adapted, self.config, self.optimizer = adapted, config, optimizer
        self.watch = watch or RouterWatch(adapted)
        self.around_backward: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.skipped = 0
        self.loss_scale = optimizer.loss_scale = LossScale() if adapted.model.dtype == torch.float16 else None
        self.fused = None
        if any(updater.fused or updater.on_host for updater in optimizer.updaters):
            self.fused = FusedBackward(adapted, optimizer)
        self.engine = next((u.engine for u in optimizer.updaters if isinstance(u, ZeroUpdater)), None)
        self._updates_in_backward = any(updater.fused for updater in optimizer.updaters)
        self._norm: Tensor | None = None  # of all gradients, where a pass has measured it
        self._broken: list[str] = []
        self._loss = torch.zeros((), device=adapted.model.device)
        self._stack = decoder_stack(adapted.model)
        self._of_experts = set(adapted.of_experts())
        self.loss = self._loss

    @property
    def measures_first(self) -> bool:
        """Whether a fused step needs a pass that only measures."""
        return self._updates_in_backward and (self.config.train.max_grad_norm > 0 or self.loss_scale is not None)

    def micro_step(
        self,
        batch: Batch,
        total_tokens: Tensor | int,
        backward: Callable[[Tensor], None] = torch.Tensor.backward,
        *,
        last: bool = True,
    ) -> MicroStep:
        """Forward and backward of one micro-batch (step.py), twice where a norm must be known first.

        Args:
            last: it is the last of its step, after which the ranks' gradients must have met.
        """
        if self.engine is not None:
            backward = partial(self.engine.backward, last=last)

        def followed(loss: Tensor) -> None:
            with self.around_backward():
                backward(loss)

        set_meeting(self._stack, self.adapted.ranks, last=last)
        done = self._micro_step(batch, total_tokens, followed)
        self._loss = self._loss + done.loss
        return done

    def _micro_step(self, batch: Batch, total_tokens: Tensor | int, backward: Callable[[Tensor], None]) -> MicroStep:
        model, train, device = self.adapted.model, self.config.train, self.adapted.model.device
        if self.loss_scale is not None:
            plain, scale = backward, self.loss_scale.value

            def backward(loss: Tensor) -> None:
                plain(loss * scale)

        run = partial(micro_step, model, batch, total_tokens, self.watch, train, backward)
        if self.fused is None:
            return run()
        self.fused.max_value = train.max_grad_value * self._scale if train.accumulate == 1 else 0.0
        if not self.measures_first:
            with self.fused.updating(1.0, checked=False):
                done = run()
            self._broken, self._norm = self.fused.broken(), self.fused.norm()
            return done
        states = generator_states(device)
        with self.fused.measuring():
            done = run()
        norm = self.fused.norm()
        assert norm is not None, "nothing trains"
        self._broken, self._norm = self.fused.broken(), norm / self._scale
        if self._broken:
            return done
        set_generator_states(states, device)
        with self.fused.updating(self._clip_by(self._norm) / self._scale, checked=True):
            return run()

    @contextmanager
    def nothing_fused(self) -> Iterator[None]:
        """Inside, gradients stay where they come, whatever the run file says."""
        fused, self.fused = self.fused, None
        try:
            yield
        finally:
            self.fused = fused

    def look(self) -> Tensor:
        """Looks at the gradients of all micro-steps and ranks; the optimizer's next `step` then clips, or does nothing.

        Returns:
            Their norm before clipping, the same on every rank.

        Raises:
            UserError: one is not finite, under `train.on_nonfinite: stop`.
        """
        left = {p: p.grad for p in self.optimizer.parameters() if p.grad is not None and self.engine is None}
        self.adapted.ranks.add_up(left, self._of_experts)
        norm, self._norm = self._norm, None
        if self.engine is not None:  # gradients have met, and each rank knows the norm of all
            norm = self.engine.norm() / math.sqrt(self.adapted.ranks.parallel.ranks)
        elif not self.measures_first:
            if self.config.train.max_grad_value:
                bound = self.config.train.max_grad_value * self._scale
                for gradient in left.values():
                    bound_(here(gradient), bound)
                for updater in self.optimizer.on_host():
                    updater.bound(bound)
            norms = [] if norm is None else [norm]
            norms += [norm / self._scale for norm in self._norms(left)]
            of_host = [n for u in self.optimizer.on_host() if (n := u.norm()) is not None]
            norms += [norm_of(of_host).to(self.adapted.model.device) / self._scale] if of_host else []
            norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else None
        self.loss, self._loss = self._loss, torch.zeros_like(self._loss)
        norm = self._over_ranks(norm)
        if math.isfinite(as_float(norm + 0 * self.loss)) and not self._broken:
            self.optimizer.scale = self._clip_by(norm) / self._scale
            if self.loss_scale is not None:
                self.loss_scale.went_well()
        else:
            self._refuse(self._broken or self._broken_among(left))
            if self.engine is not None:
                self.engine.forget()
            self.optimizer.zero_grad()
            self.optimizer.skips = True
            self.skipped += 1
        self._broken = []
        return norm

    def _norms(self, gradients: Mapping[Tensor, Tensor]) -> list[Tensor]:
        """Norms whose squares sum to that of all gradients here. What several ranks hold counts in part on each."""
        by_copies: dict[int, list[Tensor]] = {}
        for parameter, gradient in gradients.items():
            copies = self.adapted.ranks.copies(parameter, of_expert=parameter in self._of_experts)
            by_copies.setdefault(copies, []).append(here(gradient))
        return [norm_of(parts) / math.sqrt(copies) for copies, parts in by_copies.items()]

    def _over_ranks(self, norm: Tensor | None) -> Tensor:
        """The norm of all ranks' gradients; `loss` becomes the sum of theirs. One message."""
        ranks = self.adapted.ranks
        if ranks.alone:
            assert norm is not None, "no micro-step came before"
            return norm
        square = torch.zeros_like(self.loss) if norm is None else norm.square()  # a rank may train nothing
        both = ranks.total(torch.stack([square, self.loss / ranks.parallel.tp]))
        self.loss = both[1]
        return both[0].sqrt()

    def update(self) -> Tensor:
        """What the trainer does after the last micro-step; returns the norm before clipping."""
        norm = self.look()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    @property
    def _scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def _clip_by(self, norm: Tensor) -> float:
        bound = self.config.train.max_grad_norm
        return min(1.0, bound / (as_float(norm) + 1e-6)) if bound else 1.0

    def _broken_among(self, gradients: dict[Tensor, Tensor]) -> list[str]:
        """Names of parameters whose gradient is not finite, the last of the model first: as backward meets them."""
        trained = reversed(self.adapted.trainable().items())
        if self.engine is not None:
            return [name for name, p in trained if not self.engine.gradient(p).isfinite().all()]
        there = gradients | {u.parameters[0]: u.gradient for u in self.optimizer.on_host() if u.norm() is not None}
        mine = [name for name, p in trained if p in there and not here(there[p]).isfinite().all()]
        return list(dict.fromkeys(chain.from_iterable(self.adapted.ranks.everyones(mine))))

    def _refuse(self, broken: list[str]) -> None:
        if self.loss_scale is not None:
            self.loss_scale.overflowed()
        elif self.config.train.on_nonfinite == "stop":
            others = f" and of {len(broken) - 1} others" if len(broken) > 1 else ""
            raise UserError(
                f"the gradient of {broken[0] if broken else 'some parameter'}{others} is not finite. No weight was "
                "updated with it. Lower optimizer.lr or train.max_grad_norm; --resume PATH goes on from a checkpoint "
                "before it went wrong. train.on_nonfinite: skip leaves such steps out"
            )
