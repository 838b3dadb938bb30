"""Pages of docs/benchmarks/: their tables say what the JSON files beside them have."""

import importlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "docs/benchmarks"


def numbers(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(FOLDER.parents[1] / "scripts/bench")
    return importlib.import_module


def assert_page_has(table: Iterable[str], page: str) -> None:
    lines = "\n".join(table)
    assert lines.count("\n") > 3
    assert f"\n\n{lines}\n\n" in (FOLDER / f"{page}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["near_the_line", "plan_times"])
def test_a_page_says_what_was_measured(name: str, script: Callable[[str], ModuleType]) -> None:
    assert_page_has(script(name).table(numbers(name)), name)


def test_the_page_of_kernels_says_what_was_compiled(script: Callable[[str], ModuleType]) -> None:
    pytest.importorskip("triton")
    assert_page_has(script("kernel_code").table(numbers("kernels")), "kernels")


def test_the_page_of_cuda_says_what_was_measured(script: Callable[[str], ModuleType]) -> None:
    devices = [numbers(f"predict_vs_measured_cuda_{capability}") for capability in (86, 89, 90)]
    assert_page_has(script("predict_vs_measured").table(devices), "predict_vs_measured_cuda")
