"""The public names: there, what they are meant to be, and loaded when they are asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import moetune
from moetune.errors import UserError
from moetune.watch.train import train

CONTRACT = [
    "MemoryReport", "MoetuneConfig", "RunConfig", "UserError", "apply_delta", "build", "count", "drift", "export",
    "load_run_config", "predict", "resolve", "score", "train", "verify", "within_budget",
]  # fmt: skip


def test_all_names_are_there() -> None:
    assert moetune.__all__ == CONTRACT
    assert set(CONTRACT) <= set(dir(moetune))
    for name in CONTRACT:
        value = getattr(moetune, name)
        assert callable(value)
        assert value.__name__ == name
        assert value.__module__.startswith("moetune.")
    assert moetune.train is train  # not the room of that name
    assert moetune.UserError is UserError
    with pytest.raises(AttributeError, match="'moetune' has no attribute 'trian'"):
        _ = moetune.trian  # type: ignore[attr-defined]


def test_types_and_values_come_from_the_same_places() -> None:
    source = Path(str(moetune.__file__)).read_text(encoding="utf-8")
    typed = {
        alias.name: str(node.module).removeprefix("moetune.")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("moetune.")
        for alias in node.names
    }
    assert typed == moetune._HOMES


def test_importing_loads_nothing() -> None:
    seen = "import sys, moetune; moetune.load_run_config; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
