"""Launching a Triton kernel at a third of the host's time that Triton's own launch takes.

Imported where there is a GPU and Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
import triton


class Kernel:
    """A Triton kernel with the same `kernel[grid](...)`.

    Triton looks at each argument of each launch for what has to be compiled anew: types, alignment, numbers that are 1
    or multiples of 16. Here the numbers are the key as they are, but for those that a kernel does not specialize on,
    which differ from launch to launch.

    Parameters must come in this order: tensors, numbers that are not specialized on, other numbers, constants; a call
    gives constants by name, those that are options of Triton last. A parameter is always a float, or always an int:
    1 and 1.0 are one key.
    """

    def __init__(self, jitted: Any) -> None:
        self.jitted = jitted
        self._compiled: dict[tuple[object, ...], Any] = {}
        self._tensors = self._varying = self._constants = -1

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if self._tensors < 0:
            self._look_at(args, constants)
        tensors = args[: self._tensors]
        addresses = [tensor.data_ptr() for tensor in tensors]
        aligned = reduce(or_, addresses) % 16 == 0 or tuple(address % 16 == 0 for address in addresses)
        key = (
            tensors[0].get_device(), aligned, args[self._varying :], *constants.values(),
            *[tensor.dtype for tensor in tensors],
        )  # fmt: skip
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self.jitted[grid](*args, **constants)
            return
        compiled[(*grid, 1, 1)[:3]](*addresses, *args[self._tensors :], *list(constants.values())[: self._constants])

    def _look_at(self, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Counts the parameters of each kind, at the first launch."""
        parameters = self.jitted.params
        self._tensors = sum(torch.is_tensor(arg) for arg in args)
        varying = [p.num for p in parameters if p.do_not_specialize]
        self._varying = self._tensors + len(varying)
        self._constants = len(parameters) - len(args)
        assert all(torch.is_tensor(arg) for arg in args[: self._tensors])
        assert varying == list(range(self._tensors, self._varying))
        assert [p.name for p in parameters[len(args) :]] == list(constants)[: self._constants]


def kernel(**options: Any) -> Callable[[Callable[..., None]], Any]:
    """`triton.jit` with these options, and a quick launch where it compiles; Triton's interpreter has none."""

    def define(function: Callable[..., None]) -> Any:
        jitted = triton.jit(function, **options)
        return Kernel(jitted) if isinstance(jitted, triton.JITFunction) else jitted

    return define
