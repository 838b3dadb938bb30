"""Registration of operators that have a GPU kernel, and which kernels are not used.

An operator has two implementations: a GPU kernel, and its reference, a function of torch's operations. The reference
runs where there is no kernel (a CPU), and where the kernel does not work: it does not compile, or `adapt/guard` has
found that it differs. These operators are in one table for the process, `without_kernel`.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from moetune.errors import UserError


class KernelError(Exception):
    """Raised by a kernel that cannot be compiled or launched, before it has changed any of its arguments."""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that a GPU's memory ran out; CUDA, cuBLAS and Triton say so only in the text."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        text in str(error) for text in ("out of memory", "ALLOC_FAILED")
    )


@dataclass(frozen=True)
class Operator:
    """An operator `moetune::<name>`.

    Attributes:
        reference: computes the operator with torch's operations, on any device.
        kernel: given the operator's arguments, returns the function that computes it with a GPU kernel; None if there
            is no kernel for them. That function takes the same arguments, and raises `KernelError` only before it has
            changed any of them.
        scratch: names of arguments that serve as scratch memory: what they hold afterwards has no meaning.
    """

    name: str
    reference: Callable[..., Any]
    kernel: Callable[..., Callable[..., Any] | None]
    scratch: tuple[str, ...] = ()

    def __call__(self, *args: Any) -> Any:
        """Run the kernel, or the reference if there is no kernel for these arguments or it does not work."""
        kernel = None if self.name in _without else self.kernel(*args)
        if kernel is None:
            return self.reference(*args)
        try:
            return kernel(*args)
        except KernelError as error:
            drop_kernel(self.name, f"cannot be compiled or launched ({error})")
        return self.reference(*args)


@cache
def on_gpu(module: str = "moetune.kernels.triton_kernels") -> ModuleType | None:
    """Return the module of Triton kernels named `module`; None, after a warning, if Triton cannot compile here.

    The result is cached for the process.
    """
    try:
        triton_kernels = import_module(module)
        triton_kernels.triton.runtime.driver.active  # noqa: B018  Triton compiles its driver module here
    except Exception as error:  # compiler, linker and driver raise errors of any type
        warnings.warn(
            f"Triton does not work here ({type(error).__name__}: {error}), so experts run slower, and may take more "
            "memory than predicted; it needs a C compiler (gcc) and Python's headers",
            stacklevel=2,
        )
        return None
    return triton_kernels


OPERATORS: dict[str, Operator] = {}
"""Every operator with a kernel, by name. A module that defines operators adds them when it is imported."""
_without: dict[str, str] = {}


def without_kernel() -> Mapping[str, str]:
    """Return operator name -> reason, for the operators whose kernel is not used."""
    return _without


def drop_kernel(name: str, why: str) -> None:
    """Use an operator's reference from now on in this process, and warn; does nothing if it is used already.

    `why` says what is wrong with the kernel, as in "cannot be compiled".
    """
    if name not in _without:
        _without[name] = why
        warnings.warn(
            f"the kernel of {name} {why}: torch's operations run in its place; they are slower and take other "
            "memory than predicted",
            stacklevel=3,
        )


def use_kernels(*, but: Collection[str]) -> None:
    """Use the kernels of all operators except those named in `but`, from now on in this process.

    Raises:
        UserError: a name is not that of an operator.
    """
    if unknown := sorted(set(but) - OPERATORS.keys()):
        raise UserError(
            f"hardware.without_kernels: {unknown[0]!r} is no operator with a kernel; these are: "
            f"{', '.join(sorted(OPERATORS))}"
        )
    _without.clear()
    _without.update(dict.fromkeys(but, "named in hardware.without_kernels"))


@contextmanager
def using_kernels(*, but: Collection[str]) -> Iterator[None]:
    """Use the kernels of all operators but those named in `but` within the `with` block; then restore what was in use.

    Raises:
        UserError: a name is not that of an operator.
    """
    with patch.dict(_without):
        use_kernels(but=but)
        yield
