"""Updates inside the backward pass, as soon as a parameter's gradient is complete.

The gradient is then freed, so that one gradient is in memory at a time, not all (LOMO, arXiv 2306.09782, section 3.1).
For a parameter whose optimizer runs on the host (optim/offload.py), the gradient is copied there instead. Expert banks
call the post-accumulate-gradient hook themselves, for one matrix at a time, so that the gradients of a layer's experts
are not in memory together.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn

from moetune.adapt.build import Adapted
from moetune.training.optim.offload import HostUpdater
from moetune.training.optim.optimizers import CombinedOptimizer
from moetune.training.optim.values import as_float, bound_
from moetune.training.step.observer import StepObserver


class GradientNorms:
    """Norms of the gradients of one backward pass, which remain when the gradients are freed.

    `names` is parameter -> its name in messages.
    """

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self._names = names
        self._squares: list[Tensor] = []
        self._came: list[nn.Parameter] = []

    def add(self, parameter: nn.Parameter) -> Tensor:
        """Measure `parameter.grad`; return its squared norm, a float32 scalar on the device."""
        assert parameter.grad is not None
        self._came.append(parameter)
        self._squares.append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float32).square_())
        return self._squares[-1]

    def norm(self) -> Tensor | None:
        """Return the norm of all measured gradients together, a scalar on the device; None if there are none."""
        return torch.stack(self._squares).sum().sqrt() if self._squares else None

    def broken(self) -> list[str]:
        """Return the names of parameters whose gradient was NaN or infinite, in the order of the backward pass."""
        if not self._squares or math.isfinite(as_float(torch.stack(self._squares).sum())):
            return []  # one check for all gradients, because each check waits for the device
        return [
            self._names[parameter]
            for parameter, square in zip(self._came, self._squares, strict=True)
            if not math.isfinite(as_float(square))
        ]


class FusedBackward:
    """Post-accumulate-gradient hooks on all trained parameters, which act only inside `measuring` and `updating`.

    Run backward passes inside these `with` blocks; outside, gradients stay in `.grad`. The hooks end with this object.
    `observer` is notified of gradients that expert banks compute themselves.
    """

    def __init__(self, adapted: Adapted, optimizer: CombinedOptimizer, observer: StepObserver) -> None:
        self.names = {parameter: name for name, parameter in adapted.trainable().items()}
        self.updaters = {u.parameters[0]: u for u in optimizer.updaters if u.fused or u.on_host}
        self.observer = observer
        self._use: Callable[[nn.Parameter], None] | None = None
        arrived = weakref.WeakMethod(self._arrived)  # a strong reference would create a cycle

        def hook(parameter: nn.Parameter) -> None:
            if (method := arrived()) is not None:
                method(parameter)

        for parameter in self.names:
            parameter.register_post_accumulate_grad_hook(hook)
        self.hooks = adapted.expert_context.hooks

    @contextmanager
    def measuring(self, max_value: float = 0.0) -> Iterator[GradientNorms]:
        """Measure every gradient computed inside the `with` block into the yielded `GradientNorms`, and free it.

        No weight is changed. Gradients are first clipped to ±max_value, element by element; 0 for no clipping.
        """
        measured = GradientNorms(self.names)

        def use(parameter: nn.Parameter) -> None:
            measured.add(parameter)
            parameter.grad = None

        with self._using(use, max_value):
            yield measured

    @contextmanager
    def updating(self, scale: float, max_value: float = 0.0, *, checked: bool) -> Iterator[GradientNorms]:
        """Update parameters inside the `with` block as soon as their gradient is complete, and free the gradient.

        This holds for optimizers with `fused_backward`. Gradients of parameters that are updated on the host are copied
        there; all others stay in `.grad`.

        Args:
            scale: factor of the gradients in the update.
            max_value: gradients are first clipped to ±max_value, element by element; 0 for no clipping.
            checked: whether the gradients are known to be finite. If not, each is measured into the yielded
                `GradientNorms`, and after the first that is not finite no parameter is updated.
        """
        measured, is_broken = GradientNorms(self.names), False

        def use(parameter: nn.Parameter) -> None:
            nonlocal is_broken
            updater = self.updaters.get(parameter)
            if updater is None:
                return
            if isinstance(updater, HostUpdater):
                updater.take(parameter)
                return
            if not checked:
                square = measured.add(parameter)
                is_broken = is_broken or not math.isfinite(as_float(square))
            if not is_broken:
                updater.step(scale)
            parameter.grad = None

        with self._using(use, max_value):
            yield measured
        for copies in {u.host_copies for u in self.updaters.values() if isinstance(u, HostUpdater)}:
            copies.finish()

    @contextmanager
    def _using(self, use: Callable[[nn.Parameter], None], max_value: float) -> Iterator[None]:
        def bound_and_use(parameter: nn.Parameter) -> None:
            if max_value and parameter.grad is not None:
                bound_(parameter.grad, max_value)
            use(parameter)

        with patch.object(self, "_use", bound_and_use), self.hooks.using(gradient=self.take):
            yield

    def _arrived(self, parameter: nn.Parameter) -> None:
        if self._use is not None and parameter.grad is not None:  # None if an expert bank's call has freed it
            self._use(parameter)

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add `gradient`, computed by an expert bank in its backward pass, to `parameter.grad`; run the parameter's
        hook."""
        self.observer.eager_gradient(gradient)
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._arrived(parameter)
