"""The launcher of Triton kernels: errors of the first launch."""

from typing import Any

import pytest
import torch

from moetune.kernels.registry import KernelError

launch = pytest.importorskip("moetune.kernels.launch")


@pytest.mark.parametrize(
    ("said", "raised"),
    [
        ("Triton Error [CUDA]: out of memory", torch.OutOfMemoryError),
        ("Triton Error [CUDA]: invalid argument", KernelError),
    ],
)
def test_a_card_without_memory_for_a_kernel_is_told_from_a_kernel_that_does_not_load(
    said: str, raised: type[Exception]
) -> None:
    class Jitted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def load(*args: Any, **options: Any) -> None:
                raise RuntimeError(said)

            return load

    def function(out: Any, count: Any) -> None: ...

    with pytest.raises(raised, match=said.rpartition(" ")[2]):
        launch.QuickLaunch(Jitted(), function, ())[1,](torch.zeros(4), 4)
