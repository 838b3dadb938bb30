"""The reference of preference training: the adapted model before training, without a second model."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from moetune.adapt.build import Adapted
from moetune.compat.peft import without_adapters
from moetune.experts.host import empty_on_host
from moetune.run.names import is_second_factor


class Reference:
    """The reference model: an adapted model with the weights that it had when this object was made.

    `active` restores these weights for a while. LoRA that adds nothing, because every factor B is zero, is switched
    off. Everything else that trains is copied to host memory: whole experts, routers, further parameters, and LoRA that
    started from an adapter. On the device the reference costs one trained tensor, the largest, while weights are
    exchanged.

    Attributes:
        copies: (parameter, its values in host memory, in its dtype) of all that trains, without LoRA that is switched
            off.
    """

    def __init__(self, adapted: Adapted) -> None:
        self._adapted, self._is_active = adapted, False
        trained = adapted.trainable()
        lora = {name: p for name, p in trained.items() if adapted.part_of(name) == "lora"}
        seconds = [p for name, p in lora.items() if is_second_factor(name)]
        started = adapted.run.config.adapt.start_from is not None
        self._switches_lora = bool(lora) and not started and not any(bool(p.detach().any()) for p in seconds)
        self.copies: list[tuple[nn.Parameter, Tensor]] = []
        for name, parameter in trained.items():
            if name not in lora or not self._switches_lora:
                copy = empty_on_host(parameter.shape, parameter.dtype, parameter.device)
                self.copies.append((parameter, copy.copy_(parameter.detach())))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the model as the reference within the `with` block, in evaluation mode; gradients must be disabled.

        Weights are exchanged with their copies in place, one after the other, and exchanged again at the end, so a
        forward pass of the trained model before the block can be followed by its backward pass after it.
        """
        if self._is_active:
            yield
            return
        self._is_active = True
        model, hooks = self._adapted.model, self._adapted.expert_context.hooks
        training = [module for module in model.modules() if module.training]
        with ExitStack() as stack:
            stack.callback(self._end, training)
            model.eval()
            if self._switches_lora:
                stack.enter_context(hooks.using(without_lora=True))
                stack.enter_context(without_adapters(model))
            for parameter, copy in self.copies:
                _exchange(parameter, copy)
                stack.callback(_exchange, parameter, copy)
            yield

    def _end(self, training: list[nn.Module]) -> None:
        for module in training:
            module.training = True
        self._is_active = False


def _exchange(parameter: nn.Parameter, on_host: Tensor) -> None:
    """Exchange the values of a parameter and of a tensor in host memory, unseen by autograd."""
    values = parameter.data
    on_device = torch.empty_like(values).copy_(on_host)
    on_host.copy_(values)
    values.copy_(on_device)
