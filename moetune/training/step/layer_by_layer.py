"""A step's forward passes layer by layer: all micro-batches through a layer, then the next.

What a layer needs from elsewhere, such as experts in host memory, is then brought once a step. Autograd runs what was
computed last first, so one backward pass of all losses goes layer by layer too, for any model: each forward pass is a
coroutine (greenlet) that lets the others run whenever it reaches a decoder layer. All are on one thread, on which
autograd numbers its nodes. They pause outside of layers, where no mode of torch is active that the others must not see.

The last micro-batch takes the first turn, so in backward the first does: gradients are added in the order in which they
are when one micro-batch is computed after the other, bit for bit.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet
from torch import nn

from moetune.models.stack import decoder_layers

T = TypeVar("T")


def layer_by_layer(
    model: nn.Module, forwards: Sequence[Callable[[], T]], turn_of: Callable[[int], AbstractContextManager[None]]
) -> list[T]:
    """Call functions that each run the model's forward pass, layer by layer; return their results, in order.

    Args:
        turn_of: makes, from the number of a function, the context manager within which it runs until others do.
    """
    layers, scheduler = decoder_layers(model), getcurrent()
    results: dict[int, T] = {}

    def run(number: int) -> None:
        results[number] = forwards[number]()

    def let_others_run(*_: Any) -> None:
        scheduler.switch()

    turns = {number: greenlet(partial(run, number)) for number in reversed(range(len(forwards)))}
    for turn in turns.values():
        turn.gr_context = copy_context()
    whole = (layer for path, layer in layers.items() if not any(path.startswith(f"{outer}.") for outer in layers))
    hooks = [layer.register_forward_pre_hook(let_others_run, prepend=True) for layer in whole]
    try:
        while waiting := {number: turn for number, turn in turns.items() if not turn.dead}:
            for number, turn in waiting.items():
                with turn_of(number):
                    turn.switch()
    finally:
        for hook in hooks:
            hook.remove()
        for turn in turns.values():
            if not turn.dead:  # after an error: what the forward pass has entered is left
                turn.throw()
    return [results[number] for number in range(len(forwards))]
