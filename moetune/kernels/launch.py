"""A launcher of Triton kernels with a third of the host time of Triton's own.

Measurements are in docs/benchmarks/host_time.md. Import this file only with a GPU and Triton.
"""

import inspect
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from moetune.errors import one_line
from moetune.kernels.registry import KernelError, is_out_of_memory

# a product and a sum are rounded once, as the kernels' tests have it: Triton 3.10 will not, and 3.9 warns of that
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`.

    It takes a tenth of the host time of `triton.next_power_of_2`, as does `ceil_div` of that of `triton.cdiv`.
    """
    return 1 << max(0, number - 1).bit_length()


def ceil_div(number: int, size: int) -> int:
    """Return number / size, rounded up."""
    return -(-number // size)


Plan = Callable[..., tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]]
"""Function of tensors and other arguments that returns the grid of a launch, its numbers and its constants."""
Launched = tuple[Any, ...]
"""Triton's launcher, the function that returns the current stream, and fixed arguments before and after the others."""
MOST_PLANS = 1024
"""Plans that a kernel remembers: the lengths of rows may be others in each step."""


class QuickLaunch:
    """A Triton kernel with a faster launch, called like a Triton kernel as `kernel[grid](...)`.

    At each launch, Triton examines every argument for properties that need a separate compilation: type, alignment, and
    whether a number is 1 or a multiple of 16. This class instead looks up a compiled kernel by the device, alignment
    and dtypes of the tensors, and by the values of those numbers on which the kernel is specialized.

    The kernel's parameters must be in this order: tensors, numbers that it is not specialized on, other numbers,
    constants. A call passes constants by name, then Triton's options. A parameter must always be a float or always an
    int, because 1 and 1.0 are the same key.

    Args:
        jitted: the kernel as `triton.jit` returns it.
        function: the Python function of the kernel.
        varying: names of the parameters that the kernel is not specialized on.
    """

    def __init__(self, jitted: Any, function: Callable[..., None], varying: Sequence[str]) -> None:
        self.jitted, self._varying = jitted, varying
        self._names = list(inspect.signature(function).parameters)
        self._compiled: dict[tuple[object, ...], tuple[Any, ...]] = {}
        self._planned: dict[tuple[object, ...], tuple[Any, ...]] = {}
        self._tensors = -1

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """Return a function that launches the kernel on `grid`, one to three program counts."""
        return partial(self._launch, grid)

    def planned(self, key: tuple[object, ...], tensors: Sequence[Tensor], plan: Plan, *args: Any) -> None:
        """Launch the kernel on `tensors`, with what `plan(*args)` returns, which is called once for each `key`.

        All that it returns must follow from `key` and the dtypes of the tensors. Raises as `_launch` does.
        """
        addresses, bits = [tensor.data_ptr() for tensor in tensors], 0
        for address in addresses:
            bits |= address
        key = (key, tensors[0].get_device(), *[tensor.dtype for tensor in tensors])
        if bits % 16 or (known := self._planned.get(key)) is None:
            grid, numbers, constants = plan(*args)
            launched = self._launch(grid, *tensors, *numbers, **constants)
            if launched is not None and not bits % 16:
                if len(self._planned) == MOST_PLANS:
                    self._planned.clear()
                run, stream, fixed, of_kernel = launched
                self._planned[key] = run, stream, (*grid, 1, 1)[:3], fixed, (*numbers, *of_kernel)
            return
        run, stream, programs, fixed, rest = known
        run(*programs, stream(key[1]), *fixed, *addresses, *rest)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> Launched | None:
        """Launch the kernel, after compiling it if no compiled kernel has the key of these arguments.

        A grid without programs launches nothing, and returns None.

        Raises:
            KernelError: the kernel could not be compiled, loaded or launched; it has not run.
            torch.OutOfMemoryError: the GPU has too little memory for it.
        """
        if 0 in grid:
            return None
        if self._tensors < 0:
            self._tensors = sum(torch.is_tensor(arg) for arg in args)
        tensors = args[: self._tensors]
        addresses, bits = [tensor.data_ptr() for tensor in tensors], 0
        for address in addresses:
            bits |= address
        aligned = bits % 16 == 0 or tuple([address % 16 == 0 for address in addresses])
        key = (
            tensors[0].get_device(), aligned, args[self._tensors + len(self._varying) :], *constants.values(),
            *[tensor.dtype for tensor in tensors],
        )  # fmt: skip
        if (known := self._compiled.get(key)) is None:
            compiled = self._first_launch(grid, args, constants)
            of_kernel = list(constants.values())[: len(self._names) - len(args)]
            # what `compiled[grid]` would look up at each launch; without metadata and hooks, which are for profilers
            fixed = compiled.function, compiled.packed_metadata, None, None, None
            known = self._compiled[key] = compiled.run, driver.active.get_current_stream, fixed, of_kernel
            return known
        run, stream, fixed, of_kernel = known
        x, y, z = (*grid, 1, 1)[:3]
        run(x, y, z, stream(key[0]), *fixed, *addresses, *args[self._tensors :], *of_kernel)
        return known

    def _first_launch(self, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        """Compile, load and launch the kernel; return the compiled kernel. Raises as `_launch` does.

        Multiplications and additions are fused unless the call says otherwise: Triton's default depends on its version.
        """
        try:
            return self.jitted[grid](*args, **{"enable_fp_fusion": True, **constants})
        except Exception as error:  # Triton's errors, LLVM's and the driver's have no class in common
            if is_out_of_memory(error):
                raise torch.OutOfMemoryError(one_line(error)) from error
            raise KernelError(f"{type(error).__name__}: {one_line(error)}") from error


def kernel(**options: Any) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that compiles a function with `triton.jit(**options)` and wraps it in `QuickLaunch`."""
    varying = options.get("do_not_specialize", ())
    return lambda function: QuickLaunch(triton.jit(function, **options), function, varying)
