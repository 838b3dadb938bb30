"""The launcher of Triton kernels: errors of the first launch, and launches that are planned once."""

from types import SimpleNamespace
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


def test_a_plan_is_made_once_for_each_key_and_launches_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, planned = list[Any](), list[int]()

    class Jitted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def load(*args: Any, **options: Any) -> Any:
                launched.append((*grid, 1, 1, 7, "f", "m", None, None, None, args[0].data_ptr(), *args[1:], 4))
                return SimpleNamespace(function="f", packed_metadata="m", run=lambda *args: launched.append(args))

            return load

    def function(out: Any, count: Any, SIZE: Any) -> None: ...

    def plan(count: int) -> Any:
        planned.append(count)
        return (count,), (count,), {"SIZE": 4}

    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda _: 7)))
    kernel, tensor = launch.QuickLaunch(Jitted(), function, ()), torch.zeros(64)
    for count in (3, 3, 5, 3):
        kernel.planned((count,), (tensor,), plan, count)
    assert planned == [3, 5]
    fixed = 7, "f", "m", None, None, None, tensor.data_ptr()
    assert launched == [(count, 1, 1, *fixed, count, 4) for count in (3, 3, 5, 3)]
    kernel.planned((3,), (tensor[1:],), plan, 3)  # another kernel, which does not count on the alignment
    kernel.planned((0,), (tensor,), plan, 0)
    assert planned == [3, 5, 3, 0]
    assert len(launched) == 5
