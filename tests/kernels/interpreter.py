"""Modules of Triton kernels under Triton's interpreter, on the CPU."""

import importlib
import sys
from types import ModuleType

import pytest


def interpreted_module(name: str) -> ModuleType:
    """Return a copy of a module of `moetune.kernels` whose kernels are interpreted.

    It has a Triton of its own, because Triton's library is interpreted or not from when it is imported.
    """

    def of_triton() -> list[str]:
        own = (f"moetune.kernels.{part}" for part in ("launch", "tuning", "triton_low_rank", name))
        return [*(one for one in sys.modules if one.partition(".")[0] == "triton" and "_C" not in one), *own]

    compiling = {one: sys.modules.pop(one) for one in of_triton() if one in sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        module = importlib.import_module(f"moetune.kernels.{name}")
    for one in of_triton():
        sys.modules.pop(one, None)
    sys.modules.update(compiling)
    return module
