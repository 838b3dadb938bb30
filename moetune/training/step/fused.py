"""Gradients that are freed as they come: each parameter is updated in the backward pass, and its gradient freed.
Or it leaves for the host, where the update is (offload.py).

Of all gradients the largest one is alive, not their sum (LOMO, arXiv 2306.09782, section 3.1). An expert bank gives its
experts' gradients to an eager hook, one matrix at a time, so that a layer's experts do not count as one.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moetune.adapt.build import Adapted
from moetune.training.optim.offload import HostUpdater
from moetune.training.optim.optimizers import CombinedOptimizer
from moetune.training.optim.values import as_float, bound_
from moetune.training.step.observer import StepObserver


class Measured:
    """The gradients of one backward pass, measured as they came."""

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        self._names = names
        self._squares: list[Tensor] = []
        self._came: list[nn.Parameter] = []

    def add(self, parameter: nn.Parameter) -> Tensor:
        """Measures a parameter's gradient; returns the square of its norm."""
        assert parameter.grad is not None
        self._came.append(parameter)
        self._squares.append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float32).square_())
        return self._squares[-1]

    def norm(self) -> Tensor | None:
        """The norm of all together; None if there are none."""
        return torch.stack(self._squares).sum().sqrt() if self._squares else None

    def broken(self) -> list[str]:
        """Names of parameters whose gradients were not finite, as they came: the first is nearest to the loss."""
        if not self._squares or math.isfinite(as_float(torch.stack(self._squares).sum())):
            return []  # one look for all: each waits for the device
        return [
            self._names[parameter]
            for parameter, square in zip(self._came, self._squares, strict=True)
            if not math.isfinite(as_float(square))
        ]


class FusedBackward:
    """Hooks on everything that trains. Outside of `measuring` and `updating` gradients stay where they are."""

    def __init__(self, adapted: Adapted, optimizer: CombinedOptimizer, observer: StepObserver) -> None:
        self.names = {parameter: name for name, parameter in adapted.trainable().items()}
        self.updaters = {u.parameters[0]: u for u in optimizer.updaters if u.fused or u.on_host}
        self.observer = observer
        self._use: Callable[[nn.Parameter], None] | None = None
        arrived = weakref.WeakMethod(self._arrived)  # a hook that held this would hold the parameters, and they it

        def hook(parameter: nn.Parameter) -> None:
            if (method := arrived()) is not None:
                method(parameter)

        for parameter in self.names:
            parameter.register_post_accumulate_grad_hook(hook)
        self.hooks = adapted.expert_context.hooks

    @contextmanager
    def measuring(self, max_value: float = 0.0) -> Iterator[Measured]:
        """Inside, every gradient is measured and freed; no weight changes.

        Args:
            max_value: bound of every element of a gradient; 0 is none.
        """
        measured = Measured(self.names)

        def use(parameter: nn.Parameter) -> None:
            measured.add(parameter)
            parameter.grad = None

        with self._using(use, max_value):
            yield measured

    @contextmanager
    def updating(self, scale: float, max_value: float = 0.0, *, checked: bool) -> Iterator[Measured]:
        """Inside, gradients of fused parameters update them, times `scale`; the others stay.

        Args:
            max_value: as for `measuring`.
            checked: they are known to be finite. Else each is looked at, and from the first that is not on none is
                used any more.
        """
        measured, is_broken = Measured(self.names), False

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

        self._use = bound_and_use
        try:
            with self.hooks.using(gradient=self.take):
                yield
        finally:
            self._use = None

    def _arrived(self, parameter: nn.Parameter) -> None:
        if self._use is not None and parameter.grad is not None:  # autograd calls hooks for what a bank gave away too
            self._use(parameter)

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """As if the gradient had come to the parameter by itself."""
        self.observer.eager_gradient(gradient)
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._arrived(parameter)
