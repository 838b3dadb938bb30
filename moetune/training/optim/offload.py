"""Optimizers on the host (`optimizer.offload`): gradients go there, updated weights come back.

The split is that of ZeRO-Offload (arXiv 2101.06840, section 4):

    GPU    weights in compute precision; forward and backward
    host   float32 weights, optimizer states, float32 gradients; the update

A complete gradient is copied to the host while the backward pass continues, and the micro-steps' gradients are summed
there. So at most two gradients are on the GPU: one that is copied and one that is computed. The new weights of a
parameter are copied back while the host updates the next parameter. A step of m micro-steps, with n weights of b bytes,
sends m·b·n bytes to the host and b·n bytes back.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from moetune.experts.host import AsyncCopy, CopyStream, empty_on_host, mark_on_host
from moetune.training.optim.updater import MakeOptimizer, Updater
from moetune.training.optim.values import bound_


class HostCopies:
    """Streams for copies to the host (`out`) and to the GPU (`back`), shared by all parameters of a device."""

    def __init__(self, device: torch.device) -> None:
        self.out, self.back = CopyStream(device), CopyStream(device)
        self._leaving: tuple[Tensor, AsyncCopy] | None = None

    def send(self, tensor: Tensor, target: Tensor) -> AsyncCopy:
        """Start to copy `tensor` to `target`, a host tensor of the same shape and dtype; return the copy under way.

        Keeps a reference to `tensor` until the next `send` or `finish`, which waits for the copy.
        """
        copy = self.out.copy(tensor, target)
        self.finish()
        self._leaving = (tensor, copy)
        return copy

    def finish(self) -> None:
        """Wait for the last copy to the host, and free its tensor."""
        if self._leaving is not None:
            self._leaving[1].wait()
            self._leaving = None


class HostUpdater(Updater):
    """Updates one parameter on the host, where its float32 weights, gradient and optimizer states are.

    Args:
        parameter: on its device, unsharded.
        make: makes the optimizer over a list of tensors: the float32 copy on the host alone.
        copies: the streams of this device.

    Attributes:
        wire: host buffer for copies from and to the GPU, with shape and dtype of the parameter.
        gradient: float32 sum of this step's gradients, on the host.
    """

    on_host = True

    def __init__(self, parameter: nn.Parameter, make: MakeOptimizer, copies: HostCopies) -> None:
        self.parameters, self.fused, self.masters = [parameter], False, "fp32"
        self.shards, self.host_copies = {parameter: parameter}, copies
        self._arriving: AsyncCopy | None = None
        self._has_gradient = False
        with parameter.fake_mode if isinstance(parameter, FakeTensor) else nullcontext():
            size, device = tuple(parameter.shape), parameter.device
            self.wire = empty_on_host(size, parameter.dtype, device)
            self.gradient = empty_on_host(size, torch.float32, device)
            master = empty_on_host(size, torch.float32, device)
            with torch.no_grad():
                master.copy_(parameter)
        self.copies = {parameter: nn.Parameter(master)}
        self.optimizer = make([*self.copies.values()])

    @torch.no_grad()
    def take(self, parameter: nn.Parameter) -> None:
        """Start to copy `parameter.grad` to the host, where it is added to the step's sum; set it to None."""
        assert parameter.grad is not None
        self._receive()
        self._arriving = self.host_copies.send(parameter.grad, self.wire)
        parameter.grad = None

    def norm(self) -> Tensor | None:
        """Return the norm of this step's gradient, one element on the host; None if there is no gradient."""
        self._receive()
        return torch.linalg.vector_norm(self.gradient) if self._has_gradient else None

    def bound(self, value: float) -> None:
        """Clip every element of this step's gradient to the range ±value, in place (`values.bound_`)."""
        self._receive()
        if self._has_gradient:
            bound_(self.gradient, value)

    def drop(self) -> None:
        """Discard this step's gradient."""
        self._receive()
        self._has_gradient = False

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        """Update the float32 weights by `scale` times the gradient, if there is one, and copy them to the parameter.

        The gradient is discarded.
        """
        self._receive()
        if not self._has_gradient:
            return
        (parameter,), (master,) = self.parameters, self.copies.values()
        master.grad = self.gradient.mul_(scale) if scale != 1.0 else self.gradient
        self.optimizer.step()
        master.grad = None
        self._mark_states()
        self.wire.copy_(master)
        self._has_gradient = False
        self.host_copies.back.copy(self.wire, parameter).wait()

    def _receive(self) -> None:
        """Wait for the gradient that is being copied, if there is one, and add it to this step's sum."""
        if self._arriving is None:
            return
        (arrived,) = self._arriving.read()
        self._arriving = None
        if self._has_gradient:
            self.gradient.add_(arrived)
        else:
            self.gradient.copy_(arrived)
        self._has_gradient = True

    @torch.no_grad()
    def restore(self, states: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Load the states of this parameter, by name, and `master` into the float32 weights; copy these to the
        parameter."""
        super().restore(states)
        (parameter,), (master,) = self.parameters, self.copies.values()
        parameter.copy_(master)
        self._mark_states()

    def _mark_states(self) -> None:
        """Mark the optimizer's states as host memory, for the memory tracker (experts/host.py)."""
        for values in self.optimizer.state.values():
            for value in values.values():
                if isinstance(value, Tensor):
                    mark_on_host(value)
