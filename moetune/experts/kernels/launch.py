"""Launch of a Triton kernel in a third of the host's time that Triton's own launch takes
(docs/benchmarks/host_time.md).

Imported only with a GPU and Triton.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
import triton


class QuickLaunch:
    """A Triton kernel, launched likewise by `kernel[grid](...)`.

    At each launch Triton examines each argument for what needs another compilation: types, alignment, numbers that are
    1 or multiples of 16. Here the key of a compiled kernel is the numbers themselves, except those that it does not
    specialize on.

    Parameters have this order: tensors, numbers that are not specialized on, other numbers, constants. A call gives
    constants by name, then options of Triton. A parameter is always a float or always an int: 1 and 1.0 are one key.
    """

    def __init__(self, jitted: Any, function: Callable[..., None], varying: Sequence[str]) -> None:
        self.jitted, self._varying = jitted, varying
        self._names = list(inspect.signature(function).parameters)
        self._compiled: dict[tuple[object, ...], Any] = {}
        self._tensors = -1

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if self._tensors < 0:
            self._check(args, constants)
        tensors = args[: self._tensors]
        addresses = [tensor.data_ptr() for tensor in tensors]
        aligned = reduce(or_, addresses) % 16 == 0 or tuple(address % 16 == 0 for address in addresses)
        key = (
            tensors[0].get_device(), aligned, args[self._tensors + len(self._varying) :], *constants.values(),
            *[tensor.dtype for tensor in tensors],
        )  # fmt: skip
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self.jitted[grid](*args, **constants)
            return
        of_kernel = list(constants.values())[: len(self._names) - len(args)]
        compiled[(*grid, 1, 1)[:3]](*addresses, *args[self._tensors :], *of_kernel)

    def _check(self, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Check the order of the parameters, at the first launch."""
        self._tensors = sum(torch.is_tensor(arg) for arg in args)
        assert all(torch.is_tensor(arg) for arg in args[: self._tensors])
        assert self._names[self._tensors :][: len(self._varying)] == list(self._varying)
        of_kernel = self._names[len(args) :]
        assert list(constants)[: len(of_kernel)] == of_kernel


def kernel(**options: Any) -> Callable[[Callable[..., None]], Any]:
    """`triton.jit` with these options, and a quick launch where it compiles; Triton's interpreter has none."""

    def define(function: Callable[..., None]) -> Any:
        jitted = triton.jit(function, **options)
        is_compiled = isinstance(jitted, triton.JITFunction)
        return QuickLaunch(jitted, function, options.get("do_not_specialize", ())) if is_compiled else jitted

    return define
