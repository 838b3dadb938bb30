"""A driver for Triton whose GPU is the emulator: kernels take tensors of the CPU."""

import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from moetune.kernels.launch import QuickLaunch
from tests.ptx.emulator import launch
from tests.ptx.memory import Fault
from tests.ptx.program import Program

SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Compute capability -> bytes of shared memory that a block may have."""


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: its name and the files that Triton has written of it, by their suffix ("ptx", "cubin", …)."""

    name: str
    files: dict[str, Path]

    @cached_property
    def program(self) -> Program:
        """The same for the PTX of several targets if it has the same instructions."""
        return program_of(re.sub(r"^\.(version|target).*$", "", self.files["ptx"].read_text(), flags=re.MULTILINE))


program_of = lru_cache(64)(Program)


class Driver:
    """What Triton asks of a driver, for one compute capability, which is also the device's number.

    Attributes:
        tensors: arguments of the launch that follows.
        launched: each launch, as (compiled kernel, its metadata as Triton writes them).
    """

    def __init__(self, capability: int, executes: bool) -> None:
        self.capability, self._executes = capability, executes
        self.tensors: Sequence[Tensor] = ()
        self.launched: list[tuple[Compiled, Any]] = []
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED[self.capability],
            "multiprocessor_count": 84,
            "warpSize": 32,
            "max_num_regs": 65536,
        }

    def before_loading(self, module: Any, function: Any, name: str, files: dict[str, str], digest: str) -> None:
        """Note the files of the kernel that is loaded next (a hook of Triton's)."""
        self._loading = Compiled(name, {Path(path).suffix[1:]: Path(path) for path in files.values()})

    def load_binary(self, *_: Any) -> tuple[object, Compiled, int, int, int]:
        return object(), self._loading, 0, 0, 1024

    def unload_module(self, module: object) -> None:  # asked since Triton 3.8
        pass

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Return a function that launches a compiled kernel, with the arguments that Triton gives it."""
        types = [*source.signature.values()]

        def run(x: int, y: int, z: int, stream: int, compiled: Compiled, *args: Any) -> None:
            self.launched.append((compiled, metadata))
            if not self._executes:
                return
            args = args[-len(types) :]  # before them are metadata and hooks
            values = [_bits(type_, arg) for type_, arg in zip(types, args, strict=True) if type_ != "constexpr"]
            values += [0] * (len(compiled.program.parameters) - len(values))  # scratch memory, of which none is asked
            try:
                launch(compiled.program, self.tensors, values, (x, y, z), metadata.shared)
            except Fault as fault:
                raise Fault(f"{compiled.name}, grid {x} × {y} × {z}: {fault}") from fault

        return run


def _bits(type_: str, value: Any) -> int:
    """Return an argument as the bits of a kernel's parameter."""
    if type_.startswith("*"):
        return value if isinstance(value, int) else value.data_ptr()
    if type_ == "fp32":
        return int.from_bytes(struct.pack("<f", value), "little")
    return int(value)


@contextmanager
def emulated(capability: int, *, executes: bool = True) -> Iterator[Driver]:
    """Let Triton compile kernels for a compute capability (86 for 8.6) and execute them here, on tensors of the CPU.

    Each launch of a `QuickLaunch` may touch the tensors that are its arguments, and nothing else. With `executes=False`
    kernels are compiled only.
    """
    driver, loading = Driver(capability, executes), triton.knobs.runtime.kernel_load_start_hook
    plain, used = QuickLaunch._launch, set()

    def note(self: QuickLaunch, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if self not in used:  # what it has compiled is of another capability
            used.add(self)
            self._compiled.clear()
            self.jitted.device_caches.clear()
        driver.tensors = [arg for arg in args if torch.is_tensor(arg)]
        plain(self, grid, *args, **constants)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuickLaunch, "_launch", note)
        patch.setattr(triton.runtime.driver, "_active", driver)
        torch.use_deterministic_algorithms(True, warn_only=True)  # which fills what no one has written
        loading.add(driver.before_loading)
        try:
            yield driver
        finally:
            torch.use_deterministic_algorithms(False)
            loading.remove(driver.before_loading)
            for kernel in used:
                kernel._compiled.clear()
