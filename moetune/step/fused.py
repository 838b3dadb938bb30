"""Gradients that are used up as they come: each parameter is updated in the backward pass, and its gradient freed.
Or it leaves for the host, where the update is (offload.py).

Of all gradients the largest one is alive, not their sum (LOMO, arXiv 2306.09782, section 3.1). An expert bank hands its
experts' gradients over one matrix at a time, so that a layer's experts do not count as one.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moetune.adapt.build import Adapted
from moetune.experts.bank import ExpertBank
from moetune.step.offload import HostUpdater
from moetune.step.optimizers import CombinedOptimizer
from moetune.step.values import as_float, bound_


class FusedBackward:
    """Hooks on everything that trains. Outside of `measuring` and `updating` gradients stay where they are.

    Attributes:
        max_value: bound of every element of a gradient; 0 is none.
        on_gradient: is told each gradient that an expert bank hands over, which no hook on a parameter sees.
    """

    def __init__(self, adapted: Adapted, optimizer: CombinedOptimizer) -> None:
        self.names = {parameter: name for name, parameter in adapted.trainable().items()}
        self.updaters = {u.parameters[0]: u for u in optimizer.updaters if u.fused or u.on_host}
        self.max_value = 0.0
        self.on_gradient: Callable[[Tensor], None] | None = None
        self._use: Callable[[nn.Parameter], None] | None = None
        self._squares: list[Tensor] = []
        self._came: list[nn.Parameter] = []
        arrived = weakref.WeakMethod(self._arrived)  # a hook that held this would hold the parameters, and they it

        def hook(parameter: nn.Parameter) -> None:
            if (method := arrived()) is not None:
                method(parameter)

        for parameter in self.names:
            parameter.register_post_accumulate_grad_hook(hook)
        banks = (adapted.model.get_submodule(layer.experts) for layer in adapted.anatomy.moe_layers)
        self.banks = [bank for bank in banks if isinstance(bank, ExpertBank) and len(bank.trained)]

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside, every gradient is measured and dropped; no weight changes."""

        def use(parameter: nn.Parameter) -> None:
            self._measure(parameter)
            parameter.grad = None

        with self._using(use):
            yield

    @contextmanager
    def updating(self, scale: float, *, checked: bool) -> Iterator[None]:
        """Inside, gradients of fused parameters update them, times `scale`; the others stay.

        Args:
            checked: they are known to be finite. Else each is looked at, and from the first that is not on none is
                used any more.
        """
        is_broken = False

        def use(parameter: nn.Parameter) -> None:
            nonlocal is_broken
            updater = self.updaters.get(parameter)
            if updater is None:
                return
            if isinstance(updater, HostUpdater):
                updater.take(parameter)
                return
            if not checked:
                self._measure(parameter)
                is_broken = is_broken or not math.isfinite(as_float(self._squares[-1]))
            if not is_broken:
                updater.step(scale)
            parameter.grad = None

        with self._using(use):
            yield
        for bus in {u.bus for u in self.updaters.values() if isinstance(u, HostUpdater)}:
            bus.empty()

    def norm(self) -> Tensor | None:
        """The norm of all gradients that were measured in the last pass; None if none were."""
        return torch.stack(self._squares).sum().sqrt() if self._squares else None

    def broken(self) -> list[str]:
        """Names of parameters whose gradients were not finite, as they came: the first is nearest to the loss."""
        if not self._squares or math.isfinite(as_float(torch.stack(self._squares).sum())):
            return []  # one look for all: each waits for the device
        return [
            self.names[parameter]
            for parameter, square in zip(self._came, self._squares, strict=True)
            if not math.isfinite(as_float(square))
        ]

    @contextmanager
    def _using(self, use: Callable[[nn.Parameter], None]) -> Iterator[None]:
        self._use, self._came, self._squares = use, [], []
        for bank in self.banks:
            bank.hand_over = self.take
        try:
            yield
        finally:
            self._use = None
            for bank in self.banks:
                bank.hand_over = None

    def _measure(self, parameter: nn.Parameter) -> None:
        self._came.append(parameter)
        self._squares.append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float32).square_())

    def _arrived(self, parameter: nn.Parameter) -> None:
        if self._use is not None and parameter.grad is not None:  # autograd calls hooks for what was handed over too
            if self.max_value:
                bound_(parameter.grad, self.max_value)
            self._use(parameter)

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """As if the gradient had come to the parameter by itself."""
        if self.on_gradient is not None:
            self.on_gradient(gradient)
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._arrived(parameter)
